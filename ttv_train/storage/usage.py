"""What the ranks' counters came to, with what Alluxio's workers say of their cache."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import urllib3

CACHED_TIERS = ("cache", "alluxio")
UFS_COUNTER = "Worker.BytesReadPerUfs"
"""Of a worker's metrics: bytes that it has read from the under-store, by mount and user."""


class WorkerMetrics:
    """How many bytes Alluxio's workers have read from the under-store, between two looks at their metrics pages. All
    that the workers served meanwhile counts, other users' reads too.

    Args:
        urls: of the pages, one per worker.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._pool = urllib3.PoolManager(timeout=2.0, retries=False)
        self._before = {url: self._ufs_bytes(url) for url in urls}
        self._total = 0

    def under_store_bytes(self) -> int | None:
        """Since this object was made; None without pages, or where one does not answer."""
        for url in self._urls:
            now, before = self._ufs_bytes(url), self._before[url]
            if now is None:
                return None
            # A worker that was started again counts from zero.
            self._total += now if before is None or now < before else now - before
            self._before[url] = now
        return self._total if self._urls else None

    def _ufs_bytes(self, url: str) -> int | None:
        try:
            counters = self._pool.request("GET", url, redirect=True).json()["counters"]
            return sum(int(value["count"]) for name, value in counters.items() if name.startswith(UFS_COUNTER))
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError):
            return None


def usage(snapshots: Iterable[Mapping[str, Any]], alluxio_miss_bytes: int | None) -> dict[str, Any]:
    """The `storage` part of summary.json.

    Args:
        snapshots: of the counters, one per rank.
        alluxio_miss_bytes: what Alluxio had to read from the under-store meanwhile, or None if it does not say.

    Returns:
        Bytes by tier (`alluxio_bytes`, `cache_bytes`, ...), sums of the other counters, and `hit_rate`: the part of the
        bytes that came from the local tier or Alluxio's cache; None where there is neither.
    """
    num_bytes: Counter[str] = Counter(alluxio=0)
    errors: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for snapshot in snapshots:
        num_bytes.update(snapshot["bytes"])
        errors.update(snapshot["errors"])
        numbers.update({name: value for name, value in snapshot.items() if not isinstance(value, dict)})
    total = num_bytes.total()
    cached = sum(num_bytes[tier] for tier in CACHED_TIERS)
    missed = min(num_bytes["alluxio"], alluxio_miss_bytes or 0)
    return {
        **{f"{tier}_bytes": count for tier, count in num_bytes.items()},
        "hit_rate": (cached - missed) / total if cached else None,
        **numbers,
        "errors": dict(errors),
    }
