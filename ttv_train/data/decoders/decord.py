"""decord (the maintained `decord2`, or decord itself): frames by their number in presentation order.

It gets many files wrong without an error, so it is given only those whose packets show that it cannot.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from av.video.frame import VideoFrame

from ttv_train.data.decoders.base import Picture, refuse_span
from ttv_train.data.frame_index import FrameIndex
from ttv_train.data.probe import MATROSKA, MP4, BadVideoError, VideoFile


class DecordReader:
    """An open file."""

    def __init__(self, path: str, index: FrameIndex) -> None:
        import decord

        decord.logging.set_level(decord.logging.QUIET)
        self._index = index
        try:
            self._reader: Any = decord.VideoReader(path, num_threads=1)
            times = self._reader.get_frame_timestamp(np.arange(len(self._reader)))[:, 0]
        except (RuntimeError, decord.DECORDError) as error:
            raise BadVideoError(f"decord cannot open it: {str(error).strip().splitlines()[-1]}") from None
        shown = np.asarray(index.pts) * float(index.info.time_base)
        if len(times) != len(shown) or not np.allclose(times - times[0], shown - shown[0], atol=2e-3):
            raise BadVideoError("decord has other frame times than the index; use dataset.decoder pyav or auto")

    def read(self, wanted: Sequence[int]) -> Iterator[Picture]:
        """See `FrameReader`."""
        import decord

        for pts in wanted:
            try:
                picture = self._reader[bisect.bisect_left(self._index.pts, pts)].asnumpy()
            except (RuntimeError, IndexError, decord.DECORDError) as error:
                reason = str(error).strip().splitlines()[-1]
                raise BadVideoError(f"damaged: the frame at {self._index.seconds(pts):.3f} s: {reason}") from None
            if picture.shape[2] != 3:
                # decord2 3.4 takes the padding of narrow pictures for a fourth channel.
                raise BadVideoError(f"decord gives pictures of shape {picture.shape}; use dataset.decoder pyav or auto")
            yield Picture(VideoFrame.from_ndarray(picture, "rgb24"), is_upright=True)
        # It decodes on in the background otherwise, and its memory grows.
        self._reader.seek(0)

    def close(self) -> None:
        """See `FrameReader`."""
        self._reader = None


class Decord:
    """See the module."""

    name, package, module = "decord", "decord2", "decord"

    def refusal(self, index: FrameIndex) -> str | None:
        """See `Decoder`."""
        if index.info.container not in (MP4, MATROSKA):
            return f"it shows wrong frames of {index.info.container} files"
        if index.info.codec == "hevc":
            return "its seeks in hevc files fail"
        if index.has_hidden_frames:
            return "it shows frames that an edit list hides"
        if index.has_open_groups:
            return "it shows wrong frames where groups of pictures are open"
        if index.orientation.is_mirrored:
            return "it does not mirror pictures as the file says"
        return None

    def open(self, video: VideoFile, index: FrameIndex) -> DecordReader:
        """See `Decoder`."""
        refuse_span(video, self.name)
        return DecordReader(video.path, index)
