"""Causal attention over shared sequences: who holds which tokens, and which keys which queries see.

Tokens come in blocks of equal length, such as the tokens of a frame: a token sees its own block and those before it.
Blocks of one token are plain causal attention.

Ranks that hold one run of tokens each would have unequal work, the last one N times that of the first, and the ring
waits for the slowest. So the sequence is cut into 2 N runs and rank r holds runs r and 2 N - 1 - r: an early and a late
one, about as much work for every rank (as in Striped and zigzag ring attention, arXiv 2311.09431). Bytes stay the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttv_train.parallel.sequence.shapes import split_sizes, split_slices

Runs = list[slice]
"""Consecutive positions of a sequence, run after run, in the order in which a rank holds them; at least one, which may
be empty."""


def contiguous_runs(length: int, degree: int) -> list[Runs]:
    """One run for each rank."""
    return [[run] for run in split_slices(split_sizes(length, degree))]


def balanced_runs(length: int, degree: int) -> list[Runs]:
    """An early and a late run for each rank."""
    runs = split_slices(split_sizes(length, 2 * degree))
    return [[runs[rank], runs[2 * degree - 1 - rank]] for rank in range(degree)]


def divide_runs(runs: Runs, parts: int) -> list[Runs]:
    """The tokens of `runs`, in their order, dealt to `parts` ranks as equally as can be."""
    divided = []
    for part in split_slices(split_sizes(num_tokens(runs), parts)):
        pieces, start = [], 0
        for run in runs:
            stop = start + run.stop - run.start
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                pieces.append(slice(run.start + first - start, run.start + last - start))
            start = stop
        divided.append(pieces or [slice(0, 0)])
    return divided


def num_tokens(runs: Runs) -> int:
    """How many tokens these runs hold."""
    return sum(run.stop - run.start for run in runs)


def flatten_runs(runs_of_ranks: Sequence[Runs]) -> tuple[list[int], list[int]]:
    """Runs as numbers, which operators take: starts and stops of all runs, and the number of runs of each rank."""
    bounds = [bound for runs in runs_of_ranks for run in runs for bound in (run.start, run.stop)]
    return bounds, [len(runs) for runs in runs_of_ranks]


def unflatten_runs(bounds: Sequence[int], counts: Sequence[int]) -> list[Runs]:
    """The inverse of `flatten_runs`."""
    runs = [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    return [runs[part] for part in split_slices(counts)]


@dataclass(frozen=True)
class Rectangle:
    """Queries that see all of some keys; local positions."""

    query: slice
    key: slice
    diagonal: bool = False
    """Both are the same tokens, and a query sees the keys up to its own."""


EVERYTHING = Rectangle(slice(None), slice(None))


def visible_rectangles(query_runs: Runs, key_runs: Runs, block_length: int) -> list[Rectangle]:
    """What the queries of one rank see of the keys of another, as few rectangles as can be.

    Runs of different ranks do not overlap; those of one rank are compared with themselves.
    """
    rectangles = []
    query_start = 0
    for query_run in query_runs:
        key_start = 0
        for key_run in key_runs:
            if block_length == 1 and query_run == key_run:
                size = query_run.stop - query_run.start
                own, keys = slice(query_start, query_start + size), slice(key_start, key_start + size)
                rectangles.append(Rectangle(own, keys, diagonal=True))
            else:
                rectangles += _rectangles_of_runs(query_run, key_run, query_start, key_start, block_length)
            key_start += key_run.stop - key_run.start
        query_start += query_run.stop - query_run.start
    return rectangles


def _rectangles_of_runs(
    query_run: slice, key_run: slice, query_start: int, key_start: int, block_length: int
) -> list[Rectangle]:
    rectangles: list[Rectangle] = []
    if ((query_run.stop - 1) // block_length + 1) * block_length <= key_run.start:
        return rectangles
    position = query_run.start
    while position < query_run.stop:
        seen = (position // block_length + 1) * block_length
        # From here on every query sees the whole run of keys.
        following = query_run.stop if seen >= key_run.stop or seen >= query_run.stop else seen
        num_keys = min(seen, key_run.stop) - key_run.start
        if num_keys > 0 and following > position:
            first = query_start + position - query_run.start
            rectangles.append(
                Rectangle(slice(first, first + following - position), slice(key_start, key_start + num_keys))
            )
        position = following
    return rectangles
