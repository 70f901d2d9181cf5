"""Reads the samples of coming steps before they are needed: the order is known in advance."""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ttv_train.data.dataset import LatentDataset, SampleResult
from ttv_train.data.shards import LatentEntry

MAX_STEPS_IN_FLIGHT = 4
"""Enough to hide the latency of a store behind its bandwidth; more would only hold memory."""


def read_ahead(
    dataset: LatentDataset, plan: Iterable[Sequence[LatentEntry]], max_bytes: int
) -> Generator[list[SampleResult], None, None]:
    """The samples of each item of `plan`, in order.

    The next items are read meanwhile on threads: `MAX_STEPS_IN_FLIGHT` of them and `max_bytes` of samples, at most,
    though always one item. Closing the generator does not wait for a read that is under way.
    """
    pending: deque[tuple[Future[list[SampleResult]], int]] = deque()
    total = 0
    pool = ThreadPoolExecutor(MAX_STEPS_IN_FLIGHT, thread_name_prefix="read-ahead")
    try:
        for entries in plan:
            size = sum(entry.length for entry in entries)
            while pending and (len(pending) == MAX_STEPS_IN_FLIGHT or total + size > max_bytes):
                future, done = pending.popleft()
                total -= done
                yield future.result()
            pending.append((pool.submit(dataset.read_many, entries), size))
            total += size
        while pending:
            yield pending.popleft()[0].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
