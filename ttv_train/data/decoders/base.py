"""The interface that every decoding library is put behind.

Runs in the decoder's child process.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from av.video.frame import VideoFrame

from ttv_train.data.frame_index import FrameIndex
from ttv_train.data.probe import BadVideoError, VideoFile


class Picture(NamedTuple):
    """One decoded frame, before it is resized."""

    frame: VideoFrame
    is_upright: bool
    """Whether the decoder has applied the file's rotation."""


class FrameReader(Protocol):
    """One open file. Several clips are read from it, cheapest in the order in which they are shown."""

    def read(self, wanted: Sequence[int]) -> Iterator[Picture]:
        """The frames of the timestamps `wanted`, which do not decrease and are those of the file's index.

        Raises:
            BadVideoError: a frame cannot be decoded. The reader is of no more use then.
        """
        ...

    def close(self) -> None:
        """Frees the file."""
        ...


def refuse_span(video: VideoFile, decoder: str) -> None:
    """Raises BadVideoError if a video is only a part of its file."""
    if video.span is not None:
        raise BadVideoError(f"dataset.decoder {decoder}: it does not read videos inside of tar files; use auto or pyav")


class Decoder(Protocol):
    """A decoding library."""

    name: str
    """As `dataset.decoder` has it."""
    package: str
    """The distribution that provides it."""
    module: str
    """The module of that distribution."""

    def refusal(self, index: FrameIndex) -> str | None:
        """Why the library would show wrong frames of a file; None if it shows the right ones."""
        ...

    def open(self, video: VideoFile, index: FrameIndex) -> FrameReader:
        """Opens a file that is not refused. Raises BadVideoError if the library cannot."""
        ...
