"""Open files that are kept for the next read: in a mount, opening one asks its servers and costs more than a read."""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

MAX_IDLE = 64


class FileHandles:
    """Descriptors for reading, lent to one reader at a time: a mount of Alluxio answers the reads of one handle one
    after the other. Only for files that never change under their name."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, Path] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lend(self, path: Path) -> Iterator[int]:
        """A descriptor of `path`. One whose reader fails is closed, since it may be spoiled."""
        descriptor = self._take(path)
        try:
            yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            self._idle[descriptor] = path
            surplus = [self._idle.popitem(last=False)[0]] if len(self._idle) > MAX_IDLE else []
        for unused in surplus:
            os.close(unused)

    def _take(self, path: Path) -> int:
        with self._lock:
            for descriptor in reversed(self._idle):
                if self._idle[descriptor] == path:
                    del self._idle[descriptor]
                    return descriptor
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def forget(self, path: Path) -> None:
        """Closes the idle descriptors of a file that is replaced or removed after all, or whose content disappoints."""
        with self._lock:
            unused = [descriptor for descriptor, held in self._idle.items() if held == path]
            for descriptor in unused:
                del self._idle[descriptor]
        for descriptor in unused:
            os.close(descriptor)

    def __del__(self) -> None:
        for descriptor in self._idle:
            with contextlib.suppress(OSError):
                os.close(descriptor)
