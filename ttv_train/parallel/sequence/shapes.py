"""How tokens and heads are dealt to ranks when they do not divide, and the pieces of a message."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


def split_sizes(length: int, parts: int) -> list[int]:
    """`length` items in `parts` runs whose sizes differ by at most one; the first runs get the extra ones."""
    size, extra = divmod(length, parts)
    return [size + (part < extra) for part in range(parts)]


def split_slices(sizes: Sequence[int]) -> list[slice]:
    """The consecutive slices that runs of these sizes occupy."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True)
class HeadSplit:
    """Which attention heads each rank computes, and the key/value heads that those need."""

    query: tuple[slice, ...]
    key: tuple[slice, ...]
    num_query_heads: int
    num_key_heads: int

    def num_query(self, rank: int) -> int:
        return self.query[rank].stop - self.query[rank].start

    def num_key(self, rank: int) -> int:
        return self.key[rank].stop - self.key[rank].start

    def of(self, rank: int) -> tuple[slice, slice, slice]:
        """The query, key and value heads of `rank`."""
        return self.query[rank], self.key[rank], self.key[rank]

    def width(self, rank: int) -> int:
        """How many query, key and value heads `rank` has in all."""
        return self.num_query(rank) + 2 * self.num_key(rank)

    @property
    def shares_key_heads(self) -> bool:
        """True when a key/value head is needed by more than one rank."""
        return sum(map(self.num_key, range(len(self.key)))) > self.num_key_heads

    def key_head_of(self, rank: int) -> list[int]:
        """For each query head of `rank`, the index of its key/value head among those of `rank`."""
        group = self.num_query_heads // self.num_key_heads
        query = self.query[rank]
        return [head // group - self.key[rank].start for head in range(query.start, query.stop)]


def split_heads(num_query_heads: int, num_key_heads: int, parts: int) -> HeadSplit:
    """Deals heads to ranks. Grouped-query heads stay together with their key/value head where there are enough of
    those, so that each is sent once; otherwise query heads are dealt evenly and a shared key/value head goes to every
    rank that needs it.

    Raises:
        ValueError: fewer query heads than ranks.
    """
    if num_query_heads < parts:
        raise ValueError(f"{num_query_heads} attention heads cannot be dealt to {parts} ranks")
    group = num_query_heads // num_key_heads
    if num_key_heads >= parts:
        key = split_slices(split_sizes(num_key_heads, parts))
        query = [slice(part.start * group, part.stop * group) for part in key]
    else:
        query = split_slices(split_sizes(num_query_heads, parts))
        key = [slice(part.start // group, -(-part.stop // group)) for part in query]
    return HeadSplit(tuple(query), tuple(key), num_query_heads, num_key_heads)


def allocate_pieces(like: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat buffer with the type and device of `like`, and its consecutive pieces in these shapes."""
    buffer = like.new_empty(sum(map(math.prod, shapes)))
    pieces = buffer.split([math.prod(shape) for shape in shapes])
    return buffer, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
