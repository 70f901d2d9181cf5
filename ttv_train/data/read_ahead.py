"""Reads the samples of coming steps before they are needed: the order is known in advance."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from ttv_train.data.dataset import LatentDataset, SampleResult
from ttv_train.data.shards import LatentEntry

MAX_STEPS_AT_ONCE = 64
"""Samples may be small, and a run that stops waits for a read that is under way."""


def read_ahead(
    dataset: LatentDataset, plan: Iterable[Sequence[LatentEntry]], *, workers: int, max_bytes: int
) -> Generator[list[SampleResult], None, None]:
    """The samples of each item of `plan`, in order.

    The next items are read meanwhile on `workers` threads. Where that joins requests, each asks for the samples of
    several items at once. With no workers an item is read when it is asked for. At most `max_bytes` of samples are
    held, though always one item per worker. Closing the generator does not wait for a read that is under way.
    """
    if workers == 0:
        yield from map(dataset.read_many, plan)
        return
    pending: deque[tuple[Future[list[SampleResult]], list[int]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read-ahead")
    try:
        for window in _windows(
            plan, max_bytes // (workers + 1), doubled_after=workers if dataset.joins_reads else None
        ):
            if len(pending) == workers:
                yield from _items(*pending.popleft())
            entries = [entry for item in window for entry in item]
            pending.append((pool.submit(dataset.read_many, entries), [len(item) for item in window]))
        while pending:
            yield from _items(*pending.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _windows(
    plan: Iterable[Sequence[LatentEntry]], max_bytes: int, doubled_after: int | None
) -> Iterator[list[Sequence[LatentEntry]]]:
    """Items that are read together: single ones, since training waits for the first, then twice as many after every
    `doubled_after` windows; None means single ones always."""
    window: list[Sequence[LatentEntry]] = []
    size, length, number = 0, 1, 0
    for item in plan:
        more = sum(entry.length for entry in item)
        if window and (len(window) == length or size + more > max_bytes):
            yield window
            window, size, number = [], 0, number + 1
            if doubled_after and number % doubled_after == 0:
                length = min(2 * length, MAX_STEPS_AT_ONCE)
        window.append(item)
        size += more
    if window:
        yield window


def _items(future: Future[list[SampleResult]], counts: Sequence[int]) -> Iterator[list[SampleResult]]:
    results = iter(future.result())
    for count in counts:
        yield list(islice(results, count))
