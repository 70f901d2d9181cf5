"""A video cut into clips of one bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ttv_train.config import DatasetConfig, parse_bucket
from ttv_train.data.buckets import Bucket, NoBucketError, choose_bucket
from ttv_train.data.decode import exact
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import VideoInfo
from ttv_train.data.shots import Shot


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
    by_shots: bool

    @classmethod
    def of(cls, config: DatasetConfig) -> "Cutter":
        """The one of a dataset section."""
        return cls(
            buckets=[parse_bucket(bucket) for bucket in config.buckets],
            keep={parse_bucket(bucket): value for bucket, value in config.keep_probability.items()},
            fps=config.fps,
            max_clips=config.max_clips_per_video,
            by_shots=config.split == "shots",
        )

    def cut(
        self, source: VideoSource, info: VideoInfo, sha256: str, shots: Sequence[Shot] | None = None
    ) -> tuple[list[Clip], list[str]]:
        """The clips of one video, which follow each other without an overlap; within each shot without a gap.

        Args:
            source: the video.
            info: what is known of it.
            sha256: of its bytes.
            shots: its shots; None takes it for one.

        Returns:
            The clips, and why each shot that gives none does not.

        Raises:
            NoBucketError: no bucket takes any of it.
        """
        fps = exact(self.fps)
        pieces: list[tuple[Bucket, Fraction]] = []
        dropped: list[str] = []
        whole = [Shot(0.0, float(info.last_time))]
        for shot in whole if shots is None else shots:
            part = info if shots is None else part_of(info, shot)
            try:
                bucket = choose_bucket(part, self.buckets, fps, self.keep, sha256)
            except NoBucketError as error:
                if shots is None or len(shots) == 1:
                    raise
                dropped.append(f"shot at {shot.start:.1f} s: {error}")
                continue
            count = part.num_samples(fps) // bucket[0]
            pieces += [(bucket, exact(shot.start) + index * bucket[0] / fps) for index in range(count)]
        if not pieces:
            raise NoBucketError(f"no shot is used: {dropped[0]}")
        pieces = pieces[: self.max_clips]
        clips = [
            Clip(
                source=source,
                source_sha256=sha256,
                bucket=bucket,
                start_seconds=float(start),
                fps=self.fps,
                index=index,
                is_last=len(pieces) > 1 and index == len(pieces) - 1,
            )
            for index, (bucket, start) in enumerate(pieces)
        ]
        return clips, dropped


def part_of(info: VideoInfo, shot: Shot) -> VideoInfo:
    """A video as if it were only one of its shots."""
    length = exact(shot.end) - exact(shot.start)
    return replace(info, last_time=length, num_frames=round(float(length) * info.frame_rate) + 1)
