"""Causal and block-causal attention under every scheme: outputs and gradients equal one process with a mask."""

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.schemes import BALANCED, SCHEMES, build_scheme
from tests.harness import RankError, run_ranks
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel

# Tokens, query heads, key/value heads, tokens of a block.
CASES = [(16, 4, 4, 1), (13, 5, 5, 1), (3, 4, 4, 1), (24, 4, 2, 4), (17, 5, 5, 3), (7, 4, 4, 5), (5, 4, 4, 9)]


def _inputs(tokens: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, tokens, 8), (2, key_heads, tokens, 8), (2, key_heads, tokens, 8), (2, heads, tokens, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _run(sequence: SequenceParallel, case: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """Output of the local tokens, and gradients of whole inputs."""
    tokens, heads, key_heads, block = case
    *inputs, weights = _inputs(tokens, heads, key_heads)
    leaves = [x.requires_grad_() for x in inputs]
    out, _ = sequence.attention(*(sequence.shard(leaf, 2) for leaf in leaves), causal_block=block)
    (out * weights[:, :, sequence.owned(tokens)]).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _expected(case: tuple[int, int, int, int]) -> list[torch.Tensor]:
    tokens, heads, key_heads, block = case
    *inputs, weights = _inputs(tokens, heads, key_heads)
    leaves = [x.requires_grad_() for x in inputs]
    position = torch.arange(tokens) // block
    mask = position[None, :] <= position[:, None]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=heads != key_heads)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _run_cases(rank: int, world_size: int, scheme: str):
    sequence = build_scheme(scheme)
    return [(sequence.owned(case[0]), _run(sequence, case)) for case in CASES]


@pytest.mark.parametrize("scheme", [*SCHEMES, *BALANCED])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_outputs_and_gradients_equal_one_process(scheme, world_size):
    results = run_ranks(world_size, _run_cases, scheme)
    for number, case in enumerate(CASES):
        out, *gradients = _expected(case)
        for result in results:
            owned, (local_out, *_) = result[number]
            torch.testing.assert_close(local_out, out[:, :, owned], rtol=0, atol=1e-12)
        for index, gradient in enumerate(gradients, start=1):
            total = sum(result[number][1][index] for result in results)
            torch.testing.assert_close(total, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_a_mask(case):
    for actual, expected in zip(_run(NoSequenceParallel(), case), _expected(case), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def _count(rank: int, world_size: int, scheme: str) -> int:
    sequence = build_scheme(scheme)
    collectives.reset()
    _run(sequence, (24, 4, 4, 1))
    return int(collectives.snapshot()["ring"]["bytes"])


def test_balance_costs_no_bytes():
    assert run_ranks(4, _count, "causal-ring") == run_ranks(4, _count, "ring")


def _with_text(rank: int, world_size: int) -> None:
    sequence = build_scheme("ring")
    x = sequence.shard(torch.zeros(1, 2, 4, 8), 2)
    sequence.attention(x, x, x, text=(x, x, x), causal_block=1)


def test_text_is_refused():
    with pytest.raises(RankError, match="causal_block with text"):
        run_ranks(2, _with_text)
