"""Reads again what failed for a moment: exponential backoff with full jitter, up to a deadline.

Source of the jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

import errno
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ttv_train.errors import UserError
from ttv_train.storage.base import Store
from ttv_train.storage.breaker import CircuitBreaker
from ttv_train.storage.counters import counters
from ttv_train.storage.failures import CircuitOpenError, DamagedReadError, StoreUnavailableError, is_transient, kind_of
from ttv_train.storage.layer import Layer, ReadResult
from ttv_train.storage.ranges import ByteRange

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
DAMAGED_ATTEMPTS = 4
"""A connection may garble bytes; an old or cut-off object stays as it is, and is not asked for until the deadline."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

T = TypeVar("T")


class RetriedReads(Layer[Store]):
    """Retries reads that may succeed later; raises StoreUnavailableError for those that have not by the deadline.

    Args:
        deadline_seconds: how long a read is tried, from its first attempt. With 0 it is tried once.
        breaker: of the store's host.
        fail_fast: while the circuit is open, fail at once (there is a fallback) instead of waiting.
    """

    def __init__(
        self,
        inner: Store,
        *,
        deadline_seconds: float,
        breaker: CircuitBreaker,
        fail_fast: bool,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._deadline_seconds, self._breaker, self._fail_fast = deadline_seconds, breaker, fail_fast
        self._sleep, self._clock = sleep, clock
        self._jitter = random.SystemRandom()

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        results: list[ReadResult] = [b""] * len(ranges)
        pending = list(range(len(ranges)))
        times_damaged = [0] * len(ranges)
        deadline = self._clock() + self._deadline_seconds
        attempt = 0
        while pending:
            attempt += 1
            for index, result in zip(pending, self._attempt([ranges[i] for i in pending]), strict=True):
                results[index] = result
                times_damaged[index] += isinstance(result, DamagedReadError)
            pending = [i for i in pending if _may_succeed(results[i]) and times_damaged[i] < DAMAGED_ATTEMPTS]
            pause = self._pause(attempt)
            if not pending or self._clock() + pause > deadline or self._gives_up(results, pending):
                break
            counters.add("retries", len(pending))
            self._sleep(pause)
        return [self._final(result) for result in results]

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self._retried(lambda: self.inner.size(name))

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self._retried(lambda: self.inner.exists(name))

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`. Tried again like a read: writing the same object twice does no harm."""
        self._retried(lambda: self.inner.put(name, data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`. False may also mean that an earlier attempt succeeded without an answer: who needs
        to know reads the object back."""
        return self._retried(lambda: self.inner.put_if_absent(name, data))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._retried(lambda: self.inner.delete(name))

    def _attempt(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        if not self._breaker.allows():
            return [CircuitOpenError(f"{self.url} has failed repeatedly and is not asked for a while") for _ in ranges]
        results = self.inner.read_many(ranges)
        for result in results:
            # An answer that is wrong comes from a host that is up.
            self._breaker.record(isinstance(result, DamagedReadError) or not _may_succeed(result))
        return results

    def _gives_up(self, results: Sequence[ReadResult], pending: Sequence[int]) -> bool:
        return self._fail_fast and any(isinstance(results[index], CircuitOpenError) for index in pending)

    def _pause(self, attempt: int) -> float:
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(attempt - 1, 16))
        return self._jitter.uniform(longest / 2, longest)

    def _final(self, result: ReadResult) -> ReadResult:
        if isinstance(result, OSError) and is_transient(result) and not isinstance(result, DamagedReadError):
            return StoreUnavailableError(f"{self.url} cannot be read: {result}")
        return result

    def _retried(self, function: Callable[[], T]) -> T:
        deadline = self._clock() + self._deadline_seconds
        attempt = 0
        while True:
            attempt += 1
            try:
                return function()
            except (OSError, UserError) as error:
                # A refused write says so to the user, and why in its cause.
                cause = error.__cause__ if isinstance(error, UserError) else error
                if not isinstance(cause, OSError):
                    raise
                counters.add_error(kind_of(cause))
                pause = self._pause(attempt)
                is_hopeless = not is_transient(cause) or cause.errno in NO_SPACE
                if is_hopeless or self._clock() + pause > deadline:
                    raise
            counters.add("retries")
            self._sleep(pause)


def _may_succeed(result: ReadResult) -> bool:
    return isinstance(result, OSError) and is_transient(result)
