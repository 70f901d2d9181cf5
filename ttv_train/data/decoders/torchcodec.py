"""torchcodec in exact mode: frames by their number in presentation order.

Brings torch into the child process and uses the FFmpeg libraries of the system.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from av.video.frame import VideoFrame

from ttv_train.data.decoders.base import Picture, refuse_span
from ttv_train.data.frame_index import FrameIndex
from ttv_train.data.probe import MATROSKA, MP4, BadVideoError, VideoFile

CONTAINERS = {MP4, MATROSKA, "flv", "asf"}
"""In MPEG program streams it shows wrong frames; in the others its times or its count may differ from the index."""


class TorchcodecReader:
    """An open file."""

    def __init__(self, path: str, index: FrameIndex) -> None:
        from torchcodec.decoders import VideoDecoder

        self._index = index
        try:
            self._decoder: Any = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
        except (RuntimeError, ValueError) as error:
            raise BadVideoError(f"torchcodec cannot open it: {first_line(error)}") from None
        if len(self._decoder) != index.info.num_frames:
            raise BadVideoError(
                f"torchcodec counts {len(self._decoder)} frames where {index.info.num_frames} are shown; use "
                "dataset.decoder pyav or auto"
            )

    def read(self, wanted: Sequence[int]) -> Iterator[Picture]:
        """See `FrameReader`."""
        for pts in wanted:
            number = bisect.bisect_left(self._index.pts, pts)
            try:
                frame = self._decoder.get_frame_at(number)
            except (RuntimeError, ValueError, IndexError) as error:
                seconds = self._index.seconds(pts)
                raise BadVideoError(f"damaged: the frame at {seconds:.3f} s: {first_line(error)}") from None
            time = frame.pts_seconds - self._decoder.metadata.begin_stream_seconds
            if abs(time - self._index.seconds(pts)) > 0.5 * frame.duration_seconds + 1e-3:
                raise BadVideoError("torchcodec shows another frame than the index has; use auto or pyav")
            yield Picture(VideoFrame.from_ndarray(frame.data.numpy(), "rgb24"), is_upright=True)

    def close(self) -> None:
        """See `FrameReader`."""
        self._decoder = None


class Torchcodec:
    """See the module."""

    name, package, module = "torchcodec", "torchcodec", "torchcodec"

    def refusal(self, index: FrameIndex) -> str | None:
        """See `Decoder`."""
        if index.info.container not in CONTAINERS:
            return f"it may show wrong frames of {index.info.container} files"
        if index.orientation.is_mirrored:
            return "it does not mirror pictures as the file says"
        return None

    def open(self, video: VideoFile, index: FrameIndex) -> TorchcodecReader:
        """See `Decoder`."""
        refuse_span(video, self.name)
        return TorchcodecReader(video.path, index)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]
