"""Which clip shape a video is trained at."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from ttv_train.data.probe import VideoInfo
from ttv_train.parallel.rng import keyed_uniform

Bucket = tuple[int, int, int]
"""Frames, and height and width in pixels."""

# Sides are multiples of 8 or 16, so buckets that are meant to have one aspect ratio differ by up to 2.6 percent, as
# 480x832 and 720x1280 do.
SAME_ASPECT = 1.03
MIN_KEPT_FRACTION = 1 / 8
# Below this a clip would show more than one frame in four twice. 23.976 fps must do for 24, and 25 for 30.
MIN_FRAME_RATE_RATIO = 0.75


class NoBucketError(Exception):
    """No bucket takes the video. The message is the reason, in a few words."""


def choose_bucket(
    info: VideoInfo,
    buckets: Sequence[Bucket],
    fps: Fraction,
    keep: Mapping[Bucket, float] | None = None,
    key: str = "",
) -> Bucket:
    """The bucket nearest in aspect ratio among those that the video is long enough to fill at `fps`.

    Of buckets of the same aspect ratio, to 3 percent: one that needs no upscaling, and of those the largest in frames x
    height x width; else the one that needs the least upscaling. A bucket with a keep probability takes only that part
    of the videos, chosen by their `key`; the others go to the next one of their aspect ratio, as in Open-Sora.

    Raises:
        NoBucketError: the video is too short, its frame rate too low, or its shape too far from every bucket; or every
            bucket left it out.
    """
    available = info.num_samples(fps)
    fitting = [bucket for bucket in buckets if bucket[0] <= available]
    if not fitting:
        frames = f"{available} frame{'s' * (available != 1)} at {float(fps):g} fps"
        raise NoBucketError(f"too short: {frames}, the smallest bucket needs {min(buckets)[0]}")
    if min(fitting)[0] > 1 and info.frame_rate < MIN_FRAME_RATE_RATIO * fps:
        raise NoBucketError(
            f"frame rate {info.frame_rate:.3g} is too low: frames would repeat at dataset.fps {float(fps):g}"
        )

    def distance(bucket: Bucket) -> float:
        return abs(math.log(info.width * bucket[1] / (info.height * bucket[2])))

    nearest = min(map(distance, fitting))
    if math.exp(-nearest) < MIN_KEPT_FRACTION:
        raise NoBucketError(f"{info.width}x{info.height} pixels: no bucket is near this shape")

    def preference(bucket: Bucket) -> tuple[float, int, Bucket]:
        upscaling = max(bucket[1] / info.height, bucket[2] / info.width, 1.0)
        return upscaling, -math.prod(bucket), bucket

    same = nearest + math.log(SAME_ASPECT)
    candidates = sorted((bucket for bucket in fitting if distance(bucket) <= same), key=preference)
    for bucket in candidates:
        probability = (keep or {}).get(bucket, 1.0)
        if probability == 1.0 or keyed_uniform("keep", key, str(bucket)) < probability:
            return bucket
    raise NoBucketError("left out by dataset.keep_probability")
