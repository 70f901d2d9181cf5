"""A video cut into clips of one bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ttv_train.config import DatasetConfig, parse_bucket
from ttv_train.data.buckets import Bucket, choose_bucket
from ttv_train.data.decode import exact
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import VideoInfo


@dataclass(frozen=True)
class Clip:
    """A piece of a video, as it is encoded."""

    source: VideoSource
    source_sha256: str
    """Of the bytes of the video."""
    bucket: Bucket
    """Frames, height, width."""
    start_seconds: float
    """Time of the first frame, from the first frame of the video."""
    fps: float
    index: int
    """Number of the clip within its video."""
    is_last: bool
    """It is the last of several clips of its video."""


@dataclass(frozen=True)
class Cutter:
    """Cuts videos as a config says."""

    buckets: Sequence[Bucket]
    keep: Mapping[Bucket, float]
    """Probability of buckets to be taken; others have 1."""
    fps: float
    max_clips: int

    @classmethod
    def of(cls, config: DatasetConfig) -> "Cutter":
        """The one of a dataset section."""
        return cls(
            buckets=[parse_bucket(bucket) for bucket in config.buckets],
            keep={parse_bucket(bucket): value for bucket, value in config.keep_probability.items()},
            fps=config.fps,
            max_clips=config.max_clips_per_video,
        )

    def cut(self, source: VideoSource, info: VideoInfo, sha256: str) -> list[Clip]:
        """The clips of one video, which follow each other without a gap or an overlap.

        Raises:
            NoBucketError: no bucket takes it.
        """
        fps = exact(self.fps)
        bucket = choose_bucket(info, self.buckets, fps, self.keep, sha256)
        count = min(info.num_samples(fps) // bucket[0], self.max_clips)
        return [
            Clip(
                source=source,
                source_sha256=sha256,
                bucket=bucket,
                start_seconds=float(Fraction(index * bucket[0]) / fps),
                fps=self.fps,
                index=index,
                is_last=count > 1 and index == count - 1,
            )
            for index in range(count)
        ]
