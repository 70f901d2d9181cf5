"""Where the shots of a video begin and end, by PySceneDetect's content detector.

The detector sees small pictures that the decoder's child process has made; it never opens a file.
"""

import importlib.util
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from ttv_train.data.decode import ClipDecoder, exact
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import VideoInfo
from ttv_train.errors import UserError

SAMPLED_FPS = 8
PICTURE_HEIGHT = 72
FRAMES_AT_ONCE = 64
SHORTEST_SHOT_SECONDS = 0.5


class Shot(NamedTuple):
    """A part of a video without a cut: its first and last sampled frame, in seconds."""

    start: float
    end: float


def require_detector() -> None:
    """Raises UserError if PySceneDetect or OpenCV is not installed."""
    if any(importlib.util.find_spec(module) is None for module in ("scenedetect", "cv2")):
        raise UserError("dataset.split shots: needs PySceneDetect; pip install 'ttv-train[shots]', or set it to length")


def find_shots(decoder: ClipDecoder, source: VideoSource, info: VideoInfo) -> list[Shot]:
    """The shots of a video, in order.

    Frames are sampled at 8 per second or at the video's own rate, whichever is less. A shot ends at its last sampled
    frame, not at the first of the next shot, since the cut lies somewhere between them.

    Raises:
        BadVideoError: a frame cannot be decoded.
    """
    from scenedetect import FrameTimecode
    from scenedetect.detectors import ContentDetector

    fps = min(exact(info.frame_rate or 1.0), Fraction(SAMPLED_FPS))
    count = info.num_samples(fps)
    width = max(round(PICTURE_HEIGHT * info.width / info.height), 8)
    detector = ContentDetector(min_scene_len=max(round(SHORTEST_SHOT_SECONDS * fps), 1))
    cuts: set[int] = set()
    for first in range(0, count, FRAMES_AT_ONCE):
        size = (min(FRAMES_AT_ONCE, count - first), PICTURE_HEIGHT, width)
        pictures = decoder.decode_range(source, first / fps, fps, size).numpy()
        for number, picture in enumerate(pictures, first):
            found = detector.process_frame(FrameTimecode(number, float(fps)), picture[..., ::-1].copy())
            cuts.update(cut.frame_num for cut in found)
    bounds = sorted({0, *cuts, count})
    return [Shot(float(start / fps), float((stop - 1) / fps)) for start, stop in pairwise(bounds)]
