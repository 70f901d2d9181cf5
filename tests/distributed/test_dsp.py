"""A factorised space-time model under every scheme that it can use, against one process."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.dsp import DynamicSequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel
from ttv_train.parallel.sequence.ring import RingSequenceParallel
from ttv_train.parallel.sequence.ulysses import UlyssesSequenceParallel

SCHEMES = {"dsp": DynamicSequenceParallel, "ulysses": UlyssesSequenceParallel, "ring": RingSequenceParallel}
HEADS, CHANNELS = 4, 16
SHAPES = [(1, 8, 12), (2, 5, 7), (2, 1, 3), (1, 3, 2), (3, 7, 1)]
"""(B, T, S)."""


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(3 * CHANNELS, CHANNELS), (CHANNELS, CHANNELS)] * 4
    return [torch.randn(shape, generator=generator, dtype=torch.float64).div(4).requires_grad_() for shape in shapes]


def _qkv(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """(batch, tokens, C) to three of (batch, heads, tokens, D)."""
    return [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (x @ weight.mT).chunk(3, dim=2)]


def _spatial(x: torch.Tensor, weights: list[torch.Tensor], sequence: SequenceParallel) -> torch.Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(*_qkv(x.flatten(0, 1), weights[0]))
    return x + (out.transpose(1, 2).flatten(2) @ weights[1].mT).view_as(x)


def _temporal(x: torch.Tensor, weights: list[torch.Tensor], sequence: SequenceParallel) -> torch.Tensor:
    x = sequence.switch(x, from_dim=1, to_dim=2)
    locations = x.transpose(1, 2)
    out, _ = sequence.attention(*_qkv(locations.flatten(0, 1), weights[0]))
    x = x + (out.transpose(1, 2).flatten(2) @ weights[1].mT).view(locations.shape).transpose(1, 2)
    return sequence.switch(x, from_dim=2, to_dim=1, from_name="space", to_name="tokens")


def _gradients(sequence: SequenceParallel, shape: tuple[int, int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, *shape, CHANNELS, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    weights = _weights()
    hidden = sequence.shard(x, 1)
    for layer, function in enumerate((_spatial, _temporal, _spatial, _temporal)):
        hidden = function(hidden, weights[2 * layer : 2 * layer + 2], sequence)
    out = sequence.join(hidden, 1)
    owned = sequence.owned(shape[1])
    ((out - target)[:, owned] ** 2).sum().backward()
    return [out.detach(), x.grad, *(weight.grad for weight in weights)]


def _run_shapes(rank: int, world_size: int, scheme: str):
    sequence = SCHEMES[scheme](dist.group.WORLD)
    return [_gradients(sequence, shape) for shape in SHAPES]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_factorised_attention_equals_one_process(world_size, scheme):
    results = run_ranks(world_size, _run_shapes, scheme)
    for i, shape in enumerate(SHAPES):
        # Joined by `place`, outputs add up over the ranks as gradients do.
        for actual, expected in zip(
            map(sum, zip(*(result[i] for result in results), strict=True)),
            _gradients(NoSequenceParallel(), shape),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
