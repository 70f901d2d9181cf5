"""How many bytes each scheme sends, as formulas: exact for any shape, and for even ones those of the papers.

With M the bytes of one hidden tensor (B, S, H, D), N ranks, U x R = N and everything divisible, a rank sends for one
attention, forward and backward:

    ulysses         8 M (N-1) / N^2
    ring, rotate    6 M (N-1) / N
    ring, gather    4 M (N-1) / N
    usp             8 (M/N) (U-1) / U + 6 (M/N) (R-1)
    dsp             4 M (N-1) / N^2 for a spatial and temporal pair

`parallel.collectives` counts what is really sent; tests, `ttv-train verify` and the benchmarks compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel.sequence.ring import gathers
from ttv_train.parallel.sequence.shapes import HeadSplit, split_heads, split_sizes


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer of all ranks together."""

    batch: int
    tokens: int
    """Video tokens of the whole sequence."""
    heads: int
    key_heads: int
    channels: int
    """Per head."""
    itemsize: int
    """Bytes per element."""
    text_tokens: int = 0
    """Of joint attention; cross attention sends no text."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that leave one rank."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.forward + other.forward, self.backward + other.backward)


def attention_bytes(config: SequenceParallelConfig, rank: int, shape: AttentionShape) -> Bytes:
    """What `rank` of `config.degree` sends for one attention. Under dsp attention sends nothing; see `switch_bytes`."""
    sizes = split_sizes(shape.tokens, config.degree)
    match config.scheme:
        case "ulysses":
            return _ulysses_bytes(sizes, rank, shape)
        case "ring":
            return _ring_bytes(config, sizes, rank, shape)
        case "usp":
            assert config.ulysses_degree is not None
            width = config.ulysses_degree
            ring_rank, ulysses_rank = divmod(rank, width)
            rows = [sizes[start : start + width] for start in range(0, config.degree, width)]
            heads = split_heads(shape.heads, shape.key_heads, width)
            inner = replace(shape, heads=heads.num_query(ulysses_rank), key_heads=_ring_key_heads(heads, ulysses_rank))
            within = _ulysses_bytes(rows[ring_rank], ulysses_rank, shape)
            return within + _ring_bytes(config, [sum(row) for row in rows], ring_rank, inner)
        case _:
            return Bytes(0, 0)


def switch_bytes(degree: int, rank: int, shape: Sequence[int], from_dim: int, to_dim: int, itemsize: int) -> Bytes:
    """What `rank` sends when a tensor of whole shape `shape` switches from shards of `from_dim` to shards of `to_dim`
    (`SequenceParallel.switch`), and in backward when its gradient switches back."""
    own_from, own_to = (split_sizes(shape[dim], degree)[rank] for dim in (from_dim, to_dim))
    others = prod(size for dim, size in enumerate(shape) if dim not in (from_dim, to_dim)) * itemsize
    return Bytes(own_from * (shape[to_dim] - own_to) * others, own_to * (shape[from_dim] - own_from) * others)


def _hidden_bytes(shape: AttentionShape, tokens: int, heads: int) -> int:
    return shape.batch * tokens * heads * shape.channels * shape.itemsize


def _ulysses_bytes(sizes: Sequence[int], rank: int, shape: AttentionShape) -> Bytes:
    """Query, key and value go to the ranks of their heads, the output to those of its tokens; backward mirrors it."""
    heads = split_heads(shape.heads, shape.key_heads, len(sizes))
    forward = backward = 0
    for peer, size in enumerate(sizes):
        if peer != rank:
            forward += _hidden_bytes(shape, sizes[rank], heads.width(peer))
            forward += _hidden_bytes(shape, size + shape.text_tokens, heads.num_query(rank))
            backward += _hidden_bytes(shape, sizes[rank] + shape.text_tokens, heads.num_query(peer))
            backward += _hidden_bytes(shape, size, heads.width(rank))
    return Bytes(forward, backward)


def _ring_bytes(config: SequenceParallelConfig, sizes: Sequence[int], rank: int, shape: AttentionShape) -> Bytes:
    """Blocks of keys and values travel N-1 hops; gathered, they are sent to N-1 ranks. No text is sent."""
    degree = len(sizes)
    if gathers(config.ring_mode, sizes, shape.heads, shape.key_heads):
        keys = _hidden_bytes(shape, 2 * (degree - 1) * sizes[rank], shape.key_heads)
        return Bytes(keys, _hidden_bytes(shape, 2 * (sum(sizes) - sizes[rank]), shape.key_heads))
    # A rank passes on its own block and those that reach it, all but the one of the rank that follows it.
    forward = _hidden_bytes(shape, 2 * (sum(sizes) - sizes[(rank + 1) % degree]), shape.key_heads)
    # The gradients that it passes on are of the blocks of the other ranks.
    gradients = _hidden_bytes(shape, 2 * (sum(sizes) - sizes[rank]), shape.key_heads)
    gradient_itemsize = 2 if config.ring_gradient_dtype == "bfloat16" else max(4, shape.itemsize)
    return Bytes(forward, forward + gradients // shape.itemsize * gradient_itemsize)


def _ring_key_heads(heads: HeadSplit, ulysses_rank: int) -> int:
    """Key/value heads that a ring of `usp` passes around: repeated where they do not go evenly with the query heads."""
    groups = heads.key_head_of(ulysses_rank)
    size, rest = divmod(len(groups), heads.num_key(ulysses_rank))
    even = not rest and groups == [head // size for head in range(len(groups))]
    return heads.num_key(ulysses_rank) if even else len(groups)
