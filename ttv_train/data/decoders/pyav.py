"""PyAV: frames by timestamp, from the key frame before them on. Right on every file that has an index."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from ttv_train.data.decoders.base import MATROSKA, MP4, Picture
from ttv_train.data.frame_index import FrameIndex, KeyFrame, SeekError, decode_from_key_frame
from ttv_train.data.probe import BadVideoError, VideoLimits, libav_message, open_video


class PyavReader:
    """A file that stays open between clips, and goes on decoding where that is no longer than seeking."""

    def __init__(self, path: str, index: FrameIndex, limits: VideoLimits) -> None:
        self._path, self._index, self._limits = path, index, limits
        self._open_file = contextlib.ExitStack()
        self._file: tuple[InputContainer, VideoStream] | None = None
        self._frames: Iterator[VideoFrame] | None = None
        self._last_frame: VideoFrame | None = None
        self._wanted: frozenset[int] = frozenset()
        self._last_wanted = 0

    def read(self, wanted: Sequence[int]) -> Iterator[Picture]:
        """See `FrameReader`."""
        self._wanted, self._last_wanted = frozenset(wanted), wanted[-1]
        remaining = iter(wanted)
        pts = next(remaining)
        for frame in self._frames_from(pts):
            assert frame.pts is not None
            self._last_frame = frame
            if frame.pts > pts:
                break
            while frame.pts == pts:
                yield Picture(frame, is_upright=False)
                following = next(remaining, None)
                if following is None:
                    return
                pts = following
        raise BadVideoError(f"damaged: the frame at {self._index.seconds(pts):.3f} s cannot be decoded")

    def close(self) -> None:
        """See `FrameReader`."""
        self._frames = self._last_frame = self._file = None
        self._open_file.close()

    def _frames_from(self, pts: int) -> Iterator[VideoFrame]:
        """Frames in presentation order, beginning at or before `pts`."""
        key_frames = self._index.key_frames_before(pts)
        last = self._last_frame
        if self._frames is not None and last is not None:
            assert last.pts is not None
            if key_frames[-1].pts <= last.pts <= pts:
                return itertools.chain([last], self._frames)
        self._last_frame = None
        self._frames = self._decode(key_frames)
        return self._frames

    def _decode(self, key_frames: Sequence[KeyFrame]) -> Iterator[VideoFrame]:
        """Decodes from the last key frame on; from the start of the file if it cannot be sought."""
        # MP4 is sought by presentation time, AVI and MPEG streams by decoding time.
        for timestamp in (key_frames[-1].pts, key_frames[-1].dts):
            if len(key_frames) == 1 or timestamp is None:
                continue
            try:
                if self._file is None or self._index.info.container not in (MP4, MATROSKA):
                    self._file = self._reopen()
                seek(*self._file, timestamp)
                yield from decode_from_key_frame(*self._file, set(key_frames), self._is_needed)
                return
            except SeekError:
                self._file = None
        self._file = self._reopen()
        yield from decode_from_key_frame(*self._file, None, self._is_needed)

    def _reopen(self) -> tuple[InputContainer, VideoStream]:
        self._open_file.close()
        return self._open_file.enter_context(open_video(self._path, self._limits))

    def _is_needed(self, pts: int) -> bool:
        # Frames after the clip may be those of the next one.
        return pts in self._wanted or pts > self._last_wanted


def seek(container: InputContainer, stream: VideoStream, timestamp: int) -> None:
    """Moves before the packet of a timestamp. Raises SeekError if the container cannot."""
    try:
        container.seek(timestamp, stream=stream)
    except av.FFmpegError as error:
        raise SeekError(libav_message(error)) from None


class Pyav:
    """See the module."""

    name, package, module = "pyav", "av", "av"

    def refusal(self, index: FrameIndex) -> str | None:
        """See `Decoder`."""
        return None

    def open(self, path: str, index: FrameIndex, limits: VideoLimits) -> PyavReader:
        """See `Decoder`."""
        return PyavReader(path, index, limits)
