"""Reads past Alluxio: what it cannot give comes from the under-store, with the under-store's own credentials."""

import logging
import threading
import time
from collections.abc import Sequence

from ttv_train.storage.base import Store
from ttv_train.storage.counters import counters
from ttv_train.storage.layer import Layer, ReadResult
from ttv_train.storage.ranges import ByteRange

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_WARNINGS = 60.0


class FallbackReads(Layer[Store]):
    """Asks `secondary` for what `inner` fails to give. Writes go to `inner` alone."""

    def __init__(self, inner: Store, secondary: Store) -> None:
        super().__init__(inner)
        self.secondary = secondary
        self._lock = threading.Lock()
        self._next_warning = 0.0

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        results = self.inner.read_many(ranges)
        failed = {index: result for index, result in enumerate(results) if isinstance(result, OSError)}
        if not failed:
            return results
        counters.add("fallbacks", len(failed))
        self._warn(next(iter(failed.values())), len(failed))
        for index, result in zip(failed, self.secondary.read_many([ranges[i] for i in failed]), strict=True):
            results[index] = result
        return results

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        try:
            size = self.inner.size(name)
        except OSError:
            size = None
        return self.secondary.size(name) if size is None else size

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self.size(name) is not None

    def _warn(self, error: OSError, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_warning:
                return
            self._next_warning = now + SECONDS_BETWEEN_WARNINGS
        logger.warning("%d read(s) go to %s instead of %s: %s", count, self.secondary.url, self.url, error)
