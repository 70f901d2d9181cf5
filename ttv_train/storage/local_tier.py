"""A cache on the node's own disk, shared by its processes: each range is downloaded once per node.

Only ranges with a digest are kept, each in a file that its digest names. So an entry is never stale, two datasets share
what they have in common, and what a reader gets has been compared with its checksum again. Killed at any moment, the
cache holds complete files and some ``.partial-*`` ones, which the next process removes.
"""

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttv_train.storage.base import Store
from ttv_train.storage.counters import counters
from ttv_train.storage.integrity import has_checksum
from ttv_train.storage.layer import Layer, ReadResult
from ttv_train.storage.locks import ByteLocks
from ttv_train.storage.partial import PARTIAL_PREFIX, partial_file
from ttv_train.storage.posix import PARTIAL_LIFETIME_SECONDS, read_exactly
from ttv_train.storage.ranges import ByteRange, Content

logger = logging.getLogger(__name__)

LOW_WATER = 0.9
"""When the cache is full the longest unused entries go until it is filled to this part."""
RESERVED_SHARE = 0.02
"""Of the disk, which is left free for others."""


class LocalTier(Layer[Store]):
    """Keeps what was read on a local disk, up to `max_bytes`; the longest unused goes first.

    Args:
        inner: where ranges come from that are not there; it has verified what it returns.
        folder: on a fast local disk; made if absent. Several processes may share it.
        max_bytes: of the entries together.
        lock_timeout_seconds: a range that another process downloads is waited for so long, then downloaded too.
    """

    def __init__(self, inner: Store, folder: Path, max_bytes: int, lock_timeout_seconds: float) -> None:
        super().__init__(inner)
        self._folder, self._max_bytes, self._lock_timeout_seconds = folder, max_bytes, lock_timeout_seconds
        self._lock = threading.Lock()
        self._is_usable = self._is_writable = True
        self._filled_bytes = 0
        self._used_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._locks = ByteLocks(folder / "locks")
            self._used_bytes = self._scan()
        except OSError as error:
            self._step_aside(error)

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        results: list[ReadResult | None] = [self._read_entry(wanted) for wanted in ranges]
        missing = [index for index, result in enumerate(results) if result is None]
        if not missing:
            return [result for result in results if result is not None]
        keys = [digest for index in missing if (digest := ranges[index].sha256) is not None]
        with self._locked(keys):
            # Another process may have been quicker.
            if self._is_usable:
                results = [
                    self._read_entry(wanted) if result is None else result
                    for wanted, result in zip(ranges, results, strict=True)
                ]
                missing = [index for index in missing if results[index] is None]
            fetched = self.inner.read_many([ranges[index] for index in missing]) if missing else []
            for index, result in zip(missing, fetched, strict=True):
                results[index] = result
                digest = ranges[index].sha256
                if digest is not None:
                    counters.add("cache_misses")
                    if not isinstance(result, OSError):
                        self._write_entry(digest, result)
        return [result for result in results if result is not None]

    def holds(self, digest: str) -> bool:
        """See `Store.holds`."""
        return self._is_usable and self._path(digest).exists()

    def _read_entry(self, wanted: ByteRange) -> Content | None:
        if wanted.sha256 is None or not self._is_usable:
            return None
        path = self._path(wanted.sha256)
        started = time.perf_counter()
        try:
            content = path.read_bytes() if wanted.length is None else _read_file(path, wanted.length)
            if not has_checksum(content, wanted):
                counters.add_error("cache_corrupt")
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._step_aside(error)
            return None
        counters.add("cache_hits")
        counters.add_read("cache", len(content), time.perf_counter() - started)
        return content

    def _write_entry(self, digest: str, content: Content) -> None:
        if not self._is_writable or len(content) > self._max_bytes:
            return
        # Datasets share entries, and the quick checksum would let one of them put its bytes in the place of another's.
        if hashlib.sha256(content).hexdigest() != digest:
            return
        path = self._path(digest)
        try:
            self._make_room(len(content))
            with partial_file(path) as partial:
                # Not forced to the disk: an entry that a power cut has spoiled fails its digest and is read again.
                partial.write_bytes(content)
                partial.replace(path)
        except OSError as error:
            self._stop_writing(error)

    def _make_room(self, num_bytes: int) -> None:
        """Removes entries when the cache would outgrow its size. Each process counts what it has added, and looks at
        the folder again after a quarter of the room that was left then, because the others add too.

        Raises:
            OSError: ENOSPC when the disk itself is full but for what is reserved.
        """
        with self._lock:
            disk = os.statvfs(self._folder)
            if disk.f_bavail * disk.f_frsize - num_bytes < RESERVED_SHARE * disk.f_blocks * disk.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._filled_bytes += num_bytes
            if self._filled_bytes >= (self._max_bytes - self._used_bytes) / 4:
                self._used_bytes, self._filled_bytes = self._scan(num_bytes), 0

    def _scan(self, num_bytes: int = 0) -> int:
        """Bytes of the entries, after as many were removed that `num_bytes` more fit in."""
        entries, oldest_partial = [], time.time() - PARTIAL_LIFETIME_SECONDS
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not path.name.startswith(PARTIAL_PREFIX):
                    entries.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < oldest_partial:
                    path.unlink()
        total = sum(size for _, size, _ in entries)
        if total + num_bytes <= self._max_bytes:
            return total
        for _, size, path in sorted(entries):
            if total + num_bytes <= LOW_WATER * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    @contextlib.contextmanager
    def _locked(self, keys: Sequence[str]) -> Iterator[None]:
        if not self._is_usable or not keys:
            yield
            return
        with self._locks.held(keys, self._lock_timeout_seconds):
            yield

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def _stop_writing(self, error: OSError) -> None:
        """Keeps what is there and adds nothing more. Said once."""
        with self._lock:
            if not self._is_writable:
                return
            self._is_writable = False
        counters.add_error("cache_full")
        logger.warning("storage.cache_dir %s: %s; nothing more is kept there", self._folder, error.strerror)

    def _step_aside(self, error: OSError) -> None:
        """Goes on without the cache. Said once."""
        with self._lock:
            if not self._is_usable:
                return
            self._is_usable = self._is_writable = False
        counters.add_error("cache_unusable")
        logger.warning("storage.cache_dir %s: %s; this process goes on without it", self._folder, error.strerror)


def _read_file(path: Path, length: int) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_exactly(descriptor, 0, length)
    finally:
        os.close(descriptor)
