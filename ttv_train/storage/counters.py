"""What storage has cost this process: bytes by tier, waits, retries, fallbacks, errors by kind.

Tiers are where bytes came from: ``cache`` (the local tier), ``alluxio``, ``disk`` (other folders and mounts),
``remote`` (other URLs) and ``under_store`` (read past Alluxio).
"""

import threading
from collections import Counter
from typing import Any


class StorageCounters:
    """Counts since the start of the process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"read_seconds": 0.0, "wait_seconds": 0.0}

    def add_read(self, tier: str, num_bytes: int, seconds: float = 0.0) -> None:
        """Bytes that came from a tier, and how long the request took."""
        with self._lock:
            self._bytes[tier] += num_bytes
            self._numbers["reads"] += 1
            self._seconds["read_seconds"] += seconds

    def move(self, source: str, target: str, num_bytes: int) -> None:
        """Bytes that will be counted for one tier and came from another."""
        with self._lock:
            self._bytes[source] -= num_bytes
            self._bytes[target] += num_bytes

    def add_wait(self, seconds: float) -> None:
        """Time that training stood still for lack of a batch."""
        with self._lock:
            self._seconds["wait_seconds"] += seconds

    def add_error(self, kind: str) -> None:
        """A request that failed, whatever became of it."""
        with self._lock:
            self._errors[kind] += 1

    def add(self, name: str, count: int = 1) -> None:
        """One of ``retries``, ``fallbacks``, ``abandoned``, ``cache_hits``, ``cache_misses``, ``page_misses``."""
        with self._lock:
            self._numbers[name] += count

    def snapshot(self) -> dict[str, Any]:
        """Everything counted so far, as plain numbers."""
        with self._lock:
            return {
                "bytes": dict(self._bytes),
                "errors": dict(self._errors),
                **{name: self._numbers[name] for name in ("reads", "retries", "fallbacks", "abandoned")},
                **{name: self._numbers[name] for name in ("cache_hits", "cache_misses", "page_misses")},
                **self._seconds,
            }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two snapshots."""
    return {
        name: {key: count - before[name].get(key, 0) for key, count in value.items()}
        if isinstance(value, dict)
        else value - before[name]
        for name, value in after.items()
    }


counters = StorageCounters()
"""Of this process."""
