"""PyAV: frames by timestamp, from the key frame before them on. Right on every file that has an index."""

import itertools
from collections.abc import Iterator, Sequence

from av.video.frame import VideoFrame

from ttv_train.data.decoders.base import Picture
from ttv_train.data.frame_index import FrameIndex, KeyFrame, decode_from_key_frame
from ttv_train.data.probe import BadVideoError, SeekError, VideoFile


class PyavReader:
    """Goes on decoding from clip to clip where that is no longer than seeking."""

    def __init__(self, video: VideoFile, index: FrameIndex) -> None:
        self._video, self._index = video, index
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
        self._frames = self._last_frame = None

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
        video = self._video
        # MP4 is sought by presentation time, AVI and MPEG streams by decoding time.
        for timestamp in (key_frames[-1].pts, key_frames[-1].dts):
            if timestamp is None:
                continue
            try:
                video.seek(timestamp)
                yield from decode_from_key_frame(video.container, video.stream, set(key_frames), self._is_needed)
                return
            except SeekError:
                video.reopen()
        yield from decode_from_key_frame(video.container, video.stream, None, self._is_needed)

    def _is_needed(self, pts: int) -> bool:
        # Frames after the clip may be those of the next one.
        return pts in self._wanted or pts > self._last_wanted


class Pyav:
    """See the module."""

    name, package, module = "pyav", "av", "av"

    def refusal(self, index: FrameIndex) -> str | None:
        """See `Decoder`."""
        return None

    def open(self, video: VideoFile, index: FrameIndex) -> PyavReader:
        """See `Decoder`."""
        return PyavReader(video, index)
