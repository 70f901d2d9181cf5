"""Sampled frames to a video file that browsers play."""

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.video.stream import VideoStream

from ttv_train.errors import UserError
from ttv_train.storage.partial import partial_file

CODECS = {
    "libx264": {"crf": "16", "preset": "medium"},
    "libvpx-vp9": {"crf": "20", "b": "0", "cpu-used": "4"},
}
"""Encoders that give a video every current browser plays in an mp4, best first, with their options."""

ITU_R_BT_709 = 1
MPEG_RANGE = 1


def write_video(path: Path, frames: torch.Tensor | np.ndarray, fps: float) -> Path:
    """Writes an mp4: H.264 where PyAV's FFmpeg has an encoder for it, VP9 otherwise.

    Chroma is subsampled (yuv420p), so an odd height or width grows by one pixel: the last row or column is repeated.
    The file appears under its name only when it is complete, with its index first so that it plays while it loads.

    Args:
        path: the file to write.
        frames: RGB of shape (T, H, W, 3), uint8.
        fps: frames per second.

    Returns:
        `path`.

    Raises:
        ValueError: the frames have another type or shape, or `fps` is not positive.
        UserError: PyAV has no encoder for browsers.
    """
    video = frames.cpu().numpy() if isinstance(frames, torch.Tensor) else frames
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise ValueError(f"frames must be uint8 (T, H, W, 3), not {video.dtype} {video.shape}")
    if not fps > 0:
        raise ValueError(f"fps must be positive, not {fps}")
    _, height, width, _ = video.shape
    video = np.pad(video, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")

    codec = browser_codec()
    with partial_file(path) as partial:
        with av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            # The denominator covers NTSC rates (30000/1001) and keeps the time base within mp4's 32 bits.
            stream = container.add_stream(
                codec, rate=Fraction(fps).limit_denominator(1001), options=CODECS[codec], pix_fmt="yuv420p"
            )
            assert isinstance(stream, VideoStream)
            stream.height, stream.width = video.shape[1:3]
            context = stream.codec_context
            # Browsers guess the matrix of untagged video from its size; tagged video looks the same everywhere.
            context.colorspace = context.color_primaries = context.color_trc = ITU_R_BT_709
            context.color_range = MPEG_RANGE
            for image in video:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
                container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
            container.mux(stream.encode(None))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        return partial.replace(path)


def browser_codec() -> str:
    """The first of `CODECS` that PyAV can encode with."""
    for codec in CODECS:
        if codec in av.codecs_available:
            return codec
    raise UserError(
        f"PyAV {av.__version__} has none of the video encoders {', '.join(CODECS)}; install its binary wheel: "
        "pip install --force-reinstall --only-binary av av"
    )
