"""SIGTERM to a worker: it gives its units back and ends, within the time that schedulers grant."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

GRACE_SECONDS = 15.0
"""Schedulers kill 20 to 30 s after SIGTERM."""
STOPPED_BY_SIGTERM = 128 + signal.SIGTERM
"""The exit code of a worker that was stopped."""
RELEASE_SECONDS = 3.0


class StopSignal:
    """Notices SIGTERM as long as it is the context. A worker that has not ended by itself after `GRACE_SECONDS`, being
    in the middle of a long clip, is ended.

    Args:
        before_exit: called, for `RELEASE_SECONDS` at most, before the worker is ended.
    """

    def __init__(self, before_exit: Callable[[], None]) -> None:
        self.is_requested = False
        self._before_exit = before_exit
        self._timer = threading.Timer(GRACE_SECONDS, self._end)
        self._timer.daemon = True
        # Handlers belong to the main thread; a job on another one is stopped by whoever runs it there.
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._handles:
            self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._handles:
            signal.signal(signal.SIGTERM, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            self.is_requested = True
            self._timer.start()

    def _end(self) -> None:
        release = threading.Thread(target=self._before_exit, daemon=True)
        release.start()
        release.join(RELEASE_SECONDS)
        os._exit(STOPPED_BY_SIGTERM)
