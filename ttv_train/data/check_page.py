"""The page of ``check-data --html``: buckets, contact sheets with crop boxes, and everything that is dropped."""

import base64
import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from ttv_train.config import DatasetConfig, TrainingConfig, parse_bucket
from ttv_train.data.buckets import Bucket
from ttv_train.data.cut import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import BadVideoError, VideoInfo
from ttv_train.data.scan import ScannedVideo
from ttv_train.pages import write_page

PICTURES_PER_BUCKET = 12
PICTURE_SIDE = 192
DURATIONS = (1, 2, 5, 10, 20, 60, 300)
"""Limits of the histogram, in seconds."""


@dataclass(frozen=True)
class Picture:
    """One clip on a contact sheet."""

    name: str
    caption: str
    jpeg: str
    """Its first frame before it is cropped, in base64."""
    left: float
    top: float
    width: float
    height: float
    """The crop box, in percent of the frame."""


@dataclass
class BucketSummary:
    """What a bucket holds."""

    clips: int = 0
    kept_area: float = 0.0
    """Sum over clips of the part of the picture that is not cropped."""
    upscaled: int = 0
    """Clips whose video is smaller than the bucket."""
    pictures: list[Picture] = field(default_factory=list)


class DatasetPage:
    """Collects what is shown of a dataset while it is scanned."""

    def __init__(self, config: DatasetConfig, training: TrainingConfig, batch_sizes: Mapping[Bucket, int]) -> None:
        self._config, self._training, self._batch_sizes = config, training, batch_sizes
        self._decoder = ClipDecoder(config)
        self._buckets = {parse_bucket(bucket): BucketSummary() for bucket in config.buckets}
        self._durations: Counter[str] = Counter()
        self._codecs: Counter[str] = Counter()
        self._used_seconds = self._total_seconds = 0.0

    def add(self, video: ScannedVideo) -> None:
        """Counts a video."""
        if video.info is None:
            return
        seconds = float(video.info.last_time)
        self._total_seconds += seconds
        self._durations[duration_class(seconds)] += 1
        self._codecs[f"{video.info.codec} in {video.info.container.partition(',')[0]}"] += 1
        for clip in video.clips:
            summary = self._buckets[clip.bucket]
            left, top, width, height = crop_box(video.info, clip.bucket)
            summary.clips += 1
            summary.kept_area += width * height
            summary.upscaled += clip.bucket[1] > video.info.height or clip.bucket[2] > video.info.width
            self._used_seconds += min(clip.bucket[0] / clip.fps, seconds)
            shown = [picture.name for picture in summary.pictures]
            if len(shown) < PICTURES_PER_BUCKET and clip.source.name not in shown:
                jpeg = self._first_frame(clip, video.info)
                if jpeg is not None:
                    box = (100 * left, 100 * top, 100 * width, 100 * height)
                    summary.pictures.append(Picture(clip.source.name, clip.source.caption, jpeg, *box))

    def write(self, path: Path, dropped: dict[str, str]) -> None:
        """Writes the page; nothing can be added after that.

        Args:
            path: the file.
            dropped: reasons by name.
        """
        self._decoder.close()
        write_page(
            path,
            "check_data.html",
            name=self._config.path,
            buckets=[self._bucket_row(bucket, summary) for bucket, summary in sorted(self._buckets.items())],
            most_clips=max((summary.clips for summary in self._buckets.values()), default=0) or 1,
            durations=[(name, self._durations[name]) for name in map(duration_class, (*DURATIONS, 1e9))],
            most_videos=max(self._durations.values(), default=0) or 1,
            codecs=self._codecs.most_common(),
            used_seconds=self._used_seconds,
            total_seconds=self._total_seconds,
            dropped=sorted(dropped.items()),
            reasons=Counter(dropped.values()).most_common(),
        )

    def _bucket_row(self, bucket: Bucket, summary: BucketSummary) -> dict[str, object]:
        name = "x".join(map(str, bucket))
        size = self._batch_sizes.get(bucket, self._training.global_batch_size)
        batches = -(-summary.clips // size) if self._training.tail == "repeat" else summary.clips // size
        surplus = batches * size - summary.clips
        return {
            "name": name,
            "summary": summary,
            "batch_size": size,
            "batches": batches,
            "repeated": max(surplus, 0),
            "left_out": max(-surplus, 0),
            "cropped": 100 * (1 - summary.kept_area / summary.clips) if summary.clips else 0.0,
        }

    def _first_frame(self, clip: Clip, info: VideoInfo) -> str | None:
        """The whole first frame of a clip as a small JPEG in base64; None if it cannot be decoded."""
        scale = PICTURE_SIDE / max(info.height, info.width)
        size = (1, max(round(info.height * scale), 1), max(round(info.width * scale), 1))
        try:
            frame = self._decoder.decode(replace(clip, bucket=size))[0].numpy()
        except BadVideoError:
            return None
        content = io.BytesIO()
        Image.fromarray(frame).save(content, "JPEG", quality=80)
        return base64.b64encode(content.getvalue()).decode()


def crop_box(info: VideoInfo, bucket: Bucket) -> tuple[float, float, float, float]:
    """Left, top, width and height of what a bucket keeps of a picture, as fractions of it."""
    scale = max(bucket[2] / info.width, bucket[1] / info.height)
    width, height = bucket[2] / (scale * info.width), bucket[1] / (scale * info.height)
    return (1 - width) / 2, (1 - height) / 2, width, height


def duration_class(seconds: float) -> str:
    """The bar of the histogram that a video belongs to."""
    for limit in DURATIONS:
        if seconds <= limit:
            return f"up to {limit} s"
    return f"over {DURATIONS[-1]} s"
