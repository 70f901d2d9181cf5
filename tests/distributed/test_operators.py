"""The exchanges as operators: what torch.compile believes of them is true, and it does not break graphs at them."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.distributed.joint_model import PLAN, local_loss, make_batch, make_model
from tests.distributed.schemes import build_scheme
from tests.harness import run_ranks
from ttv_train.parallel.sequence import operators
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.shapes import split_heads, split_sizes

TOKENS, HEADS, KEY_HEADS, CHANNELS, TEXT = 7, 6, 3, 4, 2


def _operator_arguments(rank: int, world_size: int) -> dict[str, tuple]:
    name = dist.group.WORLD.group_name
    sizes, heads = split_sizes(TOKENS, world_size), split_heads(HEADS, KEY_HEADS, world_size)

    def draw(num_heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, tokens, num_heads, CHANNELS).transpose(1, 2)

    query, key, value = (draw(count, sizes[rank]) for count in (HEADS, KEY_HEADS, KEY_HEADS))
    text = [draw(count, TEXT) for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    own = [draw(count, TEXT + TOKENS) for count in (heads.num_query(rank), heads.num_key(rank), heads.num_key(rank))]
    counts, place = (HEADS, KEY_HEADS), (rank, name)
    mask = torch.tensor([[True, False], [True, True]])
    block = (query, key, value, text[1], text[2], mask)
    bidirectional = 0, [], []
    out, lse = torch.ops.ttv_train.ring_attention(*block, 0.5, sizes, *bidirectional, *place)
    return {
        "tokens_to_heads": (query, key, value, text, sizes, *place),
        "tokens_to_heads_backward": (*own, TEXT, sizes, *counts, *place),
        "heads_to_tokens": (own[0], TEXT, sizes, *counts, *place),
        "heads_to_tokens_backward": (draw(HEADS, sizes[rank]), draw(HEADS, TEXT), sizes, *counts, *place),
        "ring_attention": (*block, 0.5, sizes, *bidirectional, *place),
        "ring_attention_backward": (out, *block, out, lse, 0.5, torch.float32, sizes, *bidirectional, *place),
        "gather_blocks": (key, value, text[1:], sizes, *place),
        "gather_blocks_backward": (draw(KEY_HEADS, TOKENS), draw(KEY_HEADS, TOKENS), sizes, *place),
        "switch_dims": (torch.randn(2, 5, sizes[rank], 3), 2, 1, sizes, *place),
    }


def _check_operators(rank: int, world_size: int) -> list[str]:
    arguments = _operator_arguments(rank, world_size)
    for name, values in arguments.items():
        operator = getattr(torch.ops.ttv_train, name).default
        torch.library.opcheck(operator, values, test_utils=("test_schema", "test_faketensor"))
    return sorted(arguments)


def test_shapes_and_strides_are_as_declared():
    defined = sorted(name.removeprefix("ttv_train::") for name in operators._library._op_defs)
    assert run_ranks(3, _check_operators) == [defined] * 3


def _compile_blocks(rank: int, world_size: int, scheme: str):
    torch._dynamo.reset()
    counters.clear()
    sequence = build_scheme(scheme)
    model = make_model(sequence)
    parallelize_sequence(model, PLAN, sequence)
    results = []
    for compiled in (False, True):
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        for tokens in (7, 9):
            model.zero_grad()
            loss = local_loss(model, sequence, make_batch(tokens))
            loss.backward()
            results.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    return results, list(counters["graph_break"])


@pytest.mark.parametrize("scheme", ["ulysses", "ring"])
def test_compiled_blocks_break_only_where_ranks_compare_shapes(scheme):
    for results, breaks in run_ranks(2, _compile_blocks, scheme):
        eager, compiled = results[:2], results[2:]
        for expected, actual in zip(eager, compiled, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        assert len(breaks) == 1
        assert "SequenceParallel._check_agreement" in breaks[0]
