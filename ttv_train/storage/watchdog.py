"""A read inside a FUSE mount may hang until its server is back, and cannot be interrupted: it is left behind. So are
reads of client libraries whose time limits start again with every byte that arrives."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ttv_train.storage.base import Door
from ttv_train.storage.counters import counters
from ttv_train.storage.layer import PassThrough
from ttv_train.storage.ranges import Content

T = TypeVar("T")


class _Call(Generic[T]):
    """One call on a thread of its own, which the interpreter does not wait for when it ends."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.done = threading.Event()
        self.value: T
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name="storage-watched", daemon=True).start()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value


class WatchedDoor(PassThrough[Door]):
    """A door whose reads are given up after `timeout_seconds`, with TimeoutError. A write that is given up might still
    happen later: writes are waited for.

    The thread of a call that was given up stays until the kernel lets go of it. At most `max_abandoned` may be left
    behind; while there are so many, new calls fail at once. The process ends without waiting for them, as far as the
    kernel allows.
    """

    def __init__(self, door: Door, timeout_seconds: float, max_abandoned: int) -> None:
        super().__init__(door)
        self._timeout_seconds, self._max_abandoned = timeout_seconds, max_abandoned
        self._lock = threading.Lock()
        self._abandoned: list[_Call[Any]] = []

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """See `Store.read`."""
        return self._watched(lambda: self.inner.read(name, offset, length))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self._watched(lambda: self.inner.size(name))

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self._watched(lambda: self.inner.exists(name))

    def _watched(self, function: Callable[[], T]) -> T:
        with self._lock:
            self._abandoned = [call for call in self._abandoned if not call.done.is_set()]
            if len(self._abandoned) >= self._max_abandoned:
                raise TimeoutError(f"{self.url}: {len(self._abandoned)} calls hang in it already")
        call = _Call(function)
        if not call.done.wait(self._timeout_seconds):
            counters.add("abandoned")
            with self._lock:
                self._abandoned.append(call)
            raise TimeoutError(f"{self.url} did not answer in {self._timeout_seconds:g} s")
        return call.result()
