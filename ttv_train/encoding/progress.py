"""How far an encoding job is, and how busy its device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tqdm import tqdm


class EncodeProgress:
    """A progress bar of clips with frames per second and the device-busy share.

    The share is the part of the time since the first batch was decoded during which a batch was being encoded. What
    encoding returns is on the host, so the device has finished by then.

    Args:
        total: clips of the job that are not encoded yet.
        label: before the bar.
        is_shown: whether there is a bar.

    Attributes:
        clips, frames: encoded by this worker.
    """

    def __init__(self, total: int, label: str, *, is_shown: bool) -> None:
        self.clips = self.frames = 0
        self.busy_seconds = 0.0
        self._started: float | None = None
        self._ended = 0.0
        self._bar = tqdm(total=total, desc=label, unit="clip", disable=not is_shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Around the encoding of one batch."""
        began = time.perf_counter()
        if self._started is None:
            self._started = began
        try:
            yield
        finally:
            self._ended = time.perf_counter()
            self.busy_seconds += self._ended - began

    def add(self, clips: int, frames: int) -> None:
        """Counts what this worker has encoded."""
        self.clips += clips
        self.frames += frames
        seconds = self.seconds or 1.0
        self._bar.set_postfix_str(
            f"{self.frames / seconds:.1f} frames/s, device busy {self.busy_seconds / seconds:.0%}", refresh=False
        )
        self._bar.update(clips)

    def skip(self, clips: int) -> None:
        """Counts clips that need no encoding any more: bad ones, and those of other workers."""
        self._bar.update(clips)

    @property
    def seconds(self) -> float:
        """From the start of the first batch's encoding to the end of the last one's."""
        return 0.0 if self._started is None else self._ended - self._started
