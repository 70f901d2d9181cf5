"""Locks by key between the processes of one node, in one file that never grows."""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

POLL_SECONDS = 0.01


class ByteLocks:
    """A key stands for one byte of the lock file, far beyond its end. The kernel lets go of the locks of a process that
    is killed. Locks belong to the open file (F_OFD_SETLK), so that the threads of one process exclude each other too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    @contextlib.contextmanager
    def held(self, digests: Sequence[str], timeout_seconds: float) -> Iterator[None]:
        """Holds the locks of hexadecimal digests; those that are not free in time are done without."""
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            deadline = time.monotonic() + timeout_seconds
            # In one order everywhere, so that two holders never wait for each other.
            for position in sorted({int(digest[:15], 16) for digest in digests}):
                while not _try_lock(descriptor, position) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, position: int) -> bool:
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True
