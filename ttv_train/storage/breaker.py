"""A circuit breaker: a host that keeps failing is left alone for a while."""

import threading
import time
from collections.abc import Callable

FAILURES = 5
"""In a row; then the circuit opens."""
COOLDOWN_SECONDS = 5.0
"""After that one request may try whether the host is back."""


class CircuitBreaker:
    """Of one host. Closed: requests pass. Open: they do not. After a cooldown one passes and decides."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failures = 0
        self._closed_again_at = 0.0

    def allows(self) -> bool:
        """Whether a request may go to the host now."""
        with self._lock:
            if self._failures < FAILURES:
                return True
            if self._clock() < self._closed_again_at:
                return False
            self._closed_again_at = self._clock() + COOLDOWN_SECONDS
            return True

    def record(self, succeeded: bool) -> None:
        """What became of a request."""
        with self._lock:
            self._failures = 0 if succeeded else self._failures + 1
            if self._failures == FAILURES:
                self._closed_again_at = self._clock() + COOLDOWN_SECONDS


_breakers: dict[str, CircuitBreaker] = {}


def breaker_of(host: str) -> CircuitBreaker:
    """The one breaker of a host in this process."""
    return _breakers.setdefault(host, CircuitBreaker())
