"""The lowest layer: many ranges become few requests to a door, several of them under way at once."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from ttv_train.storage.base import Door
from ttv_train.storage.counters import counters
from ttv_train.storage.failures import kind_of
from ttv_train.storage.layer import Layer, ReadResult
from ttv_train.storage.ranges import ByteRange, Content, Request, coalesce


class BatchedReads(Layer[Door]):
    """Reads of a door, coalesced and in parallel; counts bytes, seconds and errors.

    Args:
        door: what answers one read at a time.
        threads: requests under way at once, at most. With 1 the caller's own thread reads.
        max_gap, max_length: see `coalesce`.
    """

    def __init__(self, door: Door, *, threads: int, max_gap: int, max_length: int) -> None:
        super().__init__(door)
        self._threads, self._max_gap, self._max_length = threads, max_gap, max_length

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="storage-read")

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        requests = coalesce(ranges, self._max_gap, self._max_length)
        in_turn = self._threads == 1 or len(requests) == 1
        answers = map(self._answer, requests) if in_turn else self._pool.map(self._answer, requests)
        results: list[ReadResult] = [b""] * len(ranges)
        for request, answer in zip(requests, answers, strict=True):
            for index in request.members:
                results[index] = answer if isinstance(answer, OSError) else _part(answer, request, ranges[index])
        return results

    def _answer(self, request: Request) -> ReadResult:
        started = time.perf_counter()
        try:
            content = self.inner.read(request.name, request.offset, request.length)
        except OSError as error:
            counters.add_error(kind_of(error))
            return error
        counters.add_read(self.tier, len(content), time.perf_counter() - started)
        return content


def _part(content: Content, request: Request, wanted: ByteRange) -> Content:
    if len(request.members) == 1:
        return content
    start = wanted.offset - request.offset
    assert wanted.length is not None
    return memoryview(content)[start : start + wanted.length]
