"""The frames of one clip: chosen by presentation time, turned upright, resized and cropped.

Runs in the decoder's child process: imports PyAV and NumPy, never torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream

from ttv_train.data.frame_index import FrameIndex, Orientation, SeekError, decode_from_key_frame
from ttv_train.data.probe import BadVideoError, VideoLimits, libav_message, open_video, refuse_size, rounding_error

# Bicubic in swscale widens its kernel when it shrinks, so it does not alias. The other flags make the result exact and
# the same on every CPU.
RESIZE = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND | Interpolation.BITEXACT


@dataclass(frozen=True)
class ClipRequest:
    """Which frames of a file, and their size."""

    start: Fraction
    """Time of the first frame, in seconds from the first frame of the video."""
    fps: Fraction
    num_frames: int
    height: int
    width: int


def decode_clip(path: str, request: ClipRequest, index: FrameIndex, limits: VideoLimits) -> Iterator[np.ndarray]:
    """The frames of a clip, `request.num_frames` of uint8 (height, width, 3), RGB.

    Frame k is the one that a player shows at time start + k / fps.

    Raises:
        BadVideoError: damage between the key frame before the clip and its last frame; or the video ends before that.
    """
    times = [request.start + k / request.fps for k in range(request.num_frames)]
    if times[-1] > index.info.last_time + rounding_error(index.info.time_base):
        raise BadVideoError("the video ends before the clip does")
    wanted = [index.shown_at(time) for time in times]
    picture: np.ndarray | None = None
    picture_pts: int | None = None
    for frame in choose_frames(path, wanted, index, limits):
        if frame.pts != picture_pts:
            picture = render(frame, index, request.height, request.width, limits)
            picture_pts = frame.pts
        assert picture is not None
        yield picture


def choose_frames(path: str, wanted: Sequence[int], index: FrameIndex, limits: VideoLimits) -> Iterator[VideoFrame]:
    """The frames with the timestamps `wanted`, which do not decrease. Decoding starts at the key frame before them."""
    remaining = iter(wanted)
    pts = next(remaining)
    for frame in decode_from(path, pts, index, limits):
        assert frame.pts is not None
        if frame.pts > pts:
            break
        while frame.pts == pts:
            yield frame
            following = next(remaining, None)
            if following is None:
                return
            pts = following
    raise BadVideoError(f"damaged: the frame at {index.seconds(pts):.3f} s cannot be decoded")


def decode_from(path: str, pts: int, index: FrameIndex, limits: VideoLimits) -> Iterator[VideoFrame]:
    """Decodes from the last key frame before the frame `pts`; from the start of the file if it cannot be sought."""
    key_frames = index.key_frames_before(pts)
    # MP4 is sought by presentation time, AVI and MPEG streams by decoding time.
    for timestamp in (key_frames[-1].pts, key_frames[-1].dts):
        if len(key_frames) == 1 or timestamp is None:
            continue
        with open_video(path, limits) as (container, stream):
            try:
                seek(container, stream, timestamp)
                yield from decode_from_key_frame(container, stream, set(key_frames))
                return
            except SeekError:
                continue
    with open_video(path, limits) as (container, stream):
        yield from decode_from_key_frame(container, stream)


def seek(container: InputContainer, stream: VideoStream, timestamp: int) -> None:
    """Moves before the packet of a timestamp. Raises SeekError if the container cannot."""
    try:
        container.seek(timestamp, stream=stream)
    except av.FFmpegError as error:
        raise SeekError(libav_message(error)) from None


def render(frame: VideoFrame, index: FrameIndex, height: int, width: int, limits: VideoLimits) -> np.ndarray:
    """Resizes a frame until it covers the target, turns it upright and crops its centre: uint8 (height, width, 3).

    Colour matrix and range are those the file declares, else libav's default (ITU-R BT.601, limited range).
    """
    target_width, target_height = (height, width) if index.orientation.transposed else (width, height)
    display_width = frame.width * index.sample_aspect_ratio
    scale = max(target_width / display_width, Fraction(target_height, frame.height))
    scaled_width = max(round(display_width * scale), target_width)
    scaled_height = max(round(frame.height * scale), target_height)
    refuse_size(scaled_width, scaled_height, limits)
    picture = frame.reformat(scaled_width, scaled_height, "rgb24", interpolation=RESIZE).to_ndarray()
    picture = turn(picture, index.orientation)
    top, left = (picture.shape[0] - height) // 2, (picture.shape[1] - width) // 2
    return np.ascontiguousarray(picture[top : top + height, left : left + width])


def turn(picture: np.ndarray, orientation: Orientation) -> np.ndarray:
    """A view of the picture (H, W, 3) standing upright."""
    if orientation.transposed:
        picture = picture.swapaxes(0, 1)
    if orientation.reversed_columns:
        picture = picture[:, ::-1]
    if orientation.reversed_rows:
        picture = picture[::-1]
    return picture
