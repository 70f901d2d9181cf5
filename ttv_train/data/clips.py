"""The clips of a dataset: every usable video cut into pieces of one bucket each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from ttv_train.config import DatasetConfig, parse_bucket
from ttv_train.data.buckets import Bucket
from ttv_train.data.cut import Clip
from ttv_train.data.dataset_manifest import KnownManifest, write_manifest
from ttv_train.data.formats import VideoSource, iter_dataset
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.scan import scan
from ttv_train.errors import UserError

__all__ = ["Clip", "check_num_frames", "list_clips", "usable_sources"]


def list_clips(
    config: DatasetConfig,
    valid_num_frames: Callable[[int], bool] | None,
    num_workers: int | None = None,
    manifest: Path | None = None,
) -> tuple[list[Clip], list[QuarantineRow]]:
    """Cuts the videos of a dataset folder into clips, in the order of its caption file.

    A video gives up to `config.max_clips_per_video` clips that follow each other without a gap or an overlap.

    Args:
        config: the dataset.
        valid_num_frames: which clip lengths the video encoder takes; None takes any.
        num_workers: videos probed at a time; None takes as many as there are cores, up to 16.
        manifest: Parquet file of an earlier scan: files that are unchanged since are not read again. It is renewed.

    Returns:
        The clips; and a row for every file, or row of a caption file, that gives none.

    Raises:
        UserError: as `iter_dataset`; or the encoder does not take the length of a bucket.
    """
    if valid_num_frames is not None:
        check_num_frames([parse_bucket(bucket) for bucket in config.buckets], valid_num_frames)
    clips: list[Clip] = []
    rejected: list[QuarantineRow] = []
    quarantined: list[QuarantineRow] = []
    known = KnownManifest.read(manifest, config) if manifest is not None else None
    with nullcontext() if manifest is None else write_manifest(manifest, config) as writer:
        for video in scan(usable_sources(config, rejected.append), config, known=known, num_workers=num_workers):
            clips += video.clips
            reasons = video.dropped_shots if video.reason is None else [video.reason]
            quarantined += [QuarantineRow(video.source.name, reason, "probe") for reason in reasons]
            if writer is not None:
                writer.add(video, were_decoded=False)
        if writer is not None:
            for row in rejected:
                writer.add_rejected(row)
    return clips, rejected + quarantined


def usable_sources(config: DatasetConfig, on_rejected: Callable[[QuarantineRow], None]) -> Iterator[VideoSource]:
    """The videos of a dataset; what in it is none goes to `on_rejected`. UserError as `iter_dataset`."""
    if not config.path:
        raise UserError("dataset.path is not set; it names the folder of clips and captions")
    with_images = any(parse_bucket(bucket)[0] == 1 for bucket in config.buckets)
    for item in iter_dataset(Path(config.path), config.layout, with_images):
        if isinstance(item, VideoSource):
            yield item
        else:
            on_rejected(QuarantineRow(item.name, item.reason, "list"))


def check_num_frames(buckets: Sequence[Bucket], valid_num_frames: Callable[[int], bool]) -> None:
    """Raises UserError if the video encoder does not take the length of a bucket, and names the nearest it takes."""
    for frames, height, width in buckets:
        if not valid_num_frames(frames):
            near = sorted(range(1, 2 * frames + 8), key=lambda number: abs(number - frames))
            valid = next(filter(valid_num_frames, near), None)
            mend = f"; {valid}x{height}x{width} would do" if valid else ""
            raise UserError(f"dataset.buckets {frames}x{height}x{width}: the VAE does not take {frames} frames{mend}")
