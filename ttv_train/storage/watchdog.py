"""A read inside a FUSE mount may hang until its server is back, and cannot be interrupted: it is left behind. So are
reads of client libraries whose time limits start again with every byte that arrives."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ttv_train.storage.base import Door
from ttv_train.storage.counters import counters

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


class WatchedDoor:
    """A door whose calls are given up after `timeout_seconds`, with TimeoutError.

    The thread of a call that was given up stays until the kernel lets go of it. At most `max_abandoned` may be left
    behind; while there are so many, new calls fail at once. The process ends without waiting for them, as far as the
    kernel allows.
    """

    def __init__(self, door: Door, timeout_seconds: float, max_abandoned: int) -> None:
        self._door, self._timeout_seconds, self._max_abandoned = door, timeout_seconds, max_abandoned
        self.url, self.tier = door.url, door.tier
        self._lock = threading.Lock()
        self._abandoned: list[_Call[object]] = []

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        return self._watched(lambda: self._door.read(name, offset, length))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self._watched(lambda: self._door.size(name))

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self._watched(lambda: self._door.exists(name))

    def health(self) -> None:
        """See `Store.health`."""
        self._watched(self._door.health)

    # Writes are not watched: one that is given up might still happen later.

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`."""
        self._door.put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return self._door.put_if_absent(name, data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._door.delete(name)

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        self._door.delete_folder(name)

    def remove_partial_files(self) -> None:
        """See `Store.remove_partial_files`."""
        self._door.remove_partial_files()

    def warm(self, names: Sequence[str]) -> bool:
        """See `Store.warm`."""
        return self._door.warm(names)

    def cached_fraction(self, name: str) -> float | None:
        """See `Store.cached_fraction`."""
        return self._door.cached_fraction(name)

    def _watched(self, function: Callable[[], T]) -> T:
        with self._lock:
            self._abandoned = [call for call in self._abandoned if not call.done.is_set()]
            if len(self._abandoned) >= self._max_abandoned:
                raise TimeoutError(f"{self.url}: {len(self._abandoned)} calls hang in it already")
        call = _Call(function)
        if not call.done.wait(self._timeout_seconds):
            counters.add("abandoned")
            with self._lock:
                self._abandoned.append(call)  # type: ignore[arg-type]
            raise TimeoutError(f"{self.url} did not answer in {self._timeout_seconds:g} s")
        return call.result()
