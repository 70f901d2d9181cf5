"""The frames of one clip: chosen by presentation time, turned upright, resized and cropped.

Runs in the decoder's child process: imports PyAV and NumPy, never torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from ttv_train.data.decoders import FrameReader, Picture
from ttv_train.data.frame_index import FrameIndex, Orientation
from ttv_train.data.probe import BadVideoError, VideoLimits, refuse_size, rounding_error

# Bicubic in swscale widens its kernel when it shrinks, so it does not alias. The other flags make the result exact and
# the same on every CPU.
RESIZE = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
PLANES_OF_RGB = (2, 0, 1)
"""Places of red, green and blue among the planes of the pixel format gbrp."""


@dataclass(frozen=True)
class ClipRequest:
    """Which frames of a file, and their size."""

    start: Fraction
    """Time of the first frame, in seconds from the first frame of the video."""
    fps: Fraction
    num_frames: int
    height: int
    width: int


def decode_clip(
    reader: FrameReader, request: ClipRequest, index: FrameIndex, limits: VideoLimits
) -> Iterator[np.ndarray]:
    """The frames of a clip, `request.num_frames` of uint8 (height, width, 3), RGB.

    Frame k is the one that a player shows at time start + k / fps.

    Raises:
        BadVideoError: damage between the key frame before the clip and its last frame; or the video ends before that.
    """
    times = [request.start + k / request.fps for k in range(request.num_frames)]
    if times[-1] > index.info.last_time + rounding_error(index.info.time_base):
        raise BadVideoError("the video ends before the clip does")
    wanted = [index.shown_at(time) for time in times]
    renderer = Renderer(index, request.height, request.width, limits)
    last: tuple[int, np.ndarray] | None = None
    for pts, picture in zip(wanted, reader.read(wanted), strict=True):
        if last is None or last[0] != pts:
            last = pts, renderer.render(picture)
        yield last[1]


class Renderer:
    """Makes the pictures of one clip from its frames."""

    def __init__(self, index: FrameIndex, height: int, width: int, limits: VideoLimits) -> None:
        self._index, self._height, self._width, self._limits = index, height, width, limits
        # Keeps its tables from frame to frame.
        self._reformatter = VideoReformatter()

    def render(self, picture: Picture) -> np.ndarray:
        """Resizes a frame until it covers the target, turns it upright and crops its centre: uint8 (H, W, 3).

        Colour matrix and range are those the file declares, else libav's default (ITU-R BT.601, limited range).
        """
        frame, height, width = picture.frame, self._height, self._width
        aspect = self._index.sample_aspect_ratio
        orientation = Orientation() if picture.is_upright else self._index.orientation
        if picture.is_upright and self._index.orientation.transposed:
            aspect = 1 / aspect
        target_width, target_height = (height, width) if orientation.transposed else (width, height)
        display_width = frame.width * aspect
        scale = max(target_width / display_width, Fraction(target_height, frame.height))
        scaled_width = max(round(display_width * scale), target_width)
        scaled_height = max(round(frame.height * scale), target_height)
        refuse_size(scaled_width, scaled_height, self._limits)
        # Planes of colour hold the same values as rgb24, to the bit, and swscale makes them in half the time.
        scaled = self._reformatter.reformat(frame, scaled_width, scaled_height, "gbrp", interpolation=RESIZE)
        result = np.empty((height, width, 3), dtype=np.uint8)
        for channel, number in enumerate(PLANES_OF_RGB):
            plane = scaled.planes[number]
            lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            pixels = turn(lines[:scaled_height, :scaled_width], orientation)
            top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
            result[..., channel] = pixels[top : top + height, left : left + width]
        return result


def turn(pixels: np.ndarray, orientation: Orientation) -> np.ndarray:
    """A view of one plane of a picture (H, W) standing upright."""
    if orientation.transposed:
        pixels = pixels.T
    if orientation.reversed_columns:
        pixels = pixels[:, ::-1]
    if orientation.reversed_rows:
        pixels = pixels[::-1]
    return pixels
