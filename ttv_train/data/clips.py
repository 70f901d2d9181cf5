"""The clips of a dataset: every usable video cut into pieces of one bucket each."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from ttv_train.config import DatasetConfig, parse_bucket
from ttv_train.data.buckets import Bucket, NoBucketError, choose_bucket
from ttv_train.data.decode import ClipDecoder, exact
from ttv_train.data.formats import VideoSource, read_dataset
from ttv_train.data.probe import BadVideoError
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.errors import UserError


@dataclass(frozen=True)
class Clip:
    """A piece of a video, as it is encoded."""

    source: VideoSource
    source_sha256: str
    """Of the bytes of the file."""
    bucket: Bucket
    """Frames, height, width."""
    start_seconds: float
    """Time of the first frame, from the first frame of the video."""
    fps: float
    index: int
    """Number of the clip within its video."""
    is_last: bool
    """It is the last of several clips of its video."""


def list_clips(
    config: DatasetConfig, valid_num_frames: Callable[[int], bool] | None, num_workers: int = 2
) -> tuple[list[Clip], list[QuarantineRow]]:
    """Cuts the videos of a dataset folder into clips, in the order of its caption file.

    A video gives up to `config.max_clips_per_video` clips that follow each other without a gap or an overlap.

    Args:
        config: the dataset.
        valid_num_frames: which clip lengths the video encoder takes; None takes any.
        num_workers: videos probed at a time.

    Returns:
        The clips; and a row for every file, or row of a caption file, that gives none.

    Raises:
        UserError: as `read_dataset`; or the encoder does not take the length of a bucket.
    """
    buckets = [parse_bucket(bucket) for bucket in config.buckets]
    if valid_num_frames is not None:
        check_num_frames(buckets, valid_num_frames)
    if not config.path:
        raise UserError("dataset.path is not set; it names the folder of clips and captions")
    with_images = any(bucket[0] == 1 for bucket in buckets)
    sources, rejected = read_dataset(Path(config.path), config.layout, with_images)
    quarantined = [QuarantineRow(source.name, source.reason, "list") for source in rejected]

    decoders: queue.SimpleQueue[ClipDecoder] = queue.SimpleQueue()

    def cut(source: VideoSource) -> list[Clip] | QuarantineRow:
        decoder = decoders.get()
        try:
            return cut_video(source, config, buckets, decoder)
        finally:
            decoders.put(decoder)

    owned = [ClipDecoder(config) for _ in range(num_workers)]
    clips: list[Clip] = []
    try:
        for decoder in owned:
            decoders.put(decoder)
        with ThreadPoolExecutor(num_workers) as pool:
            for result in pool.map(cut, sources):
                if isinstance(result, QuarantineRow):
                    quarantined.append(result)
                else:
                    clips += result
    finally:
        for decoder in owned:
            decoder.close()
    return clips, quarantined


def check_num_frames(buckets: Sequence[Bucket], valid_num_frames: Callable[[int], bool]) -> None:
    """Raises UserError if the video encoder does not take the length of a bucket, and names the nearest it takes."""
    for frames, height, width in buckets:
        if not valid_num_frames(frames):
            near = sorted(range(1, 2 * frames + 8), key=lambda number: abs(number - frames))
            valid = next(filter(valid_num_frames, near), None)
            mend = f"; {valid}x{height}x{width} would do" if valid else ""
            raise UserError(f"dataset.buckets {frames}x{height}x{width}: the VAE does not take {frames} frames{mend}")


def cut_video(
    source: VideoSource, config: DatasetConfig, buckets: Sequence[Bucket], decoder: ClipDecoder
) -> list[Clip] | QuarantineRow:
    """The clips of one video, or why it gives none."""
    fps = exact(config.fps)
    try:
        info = decoder.probe(source)
        bucket = choose_bucket(info, buckets, fps)
        sha256 = decoder.sha256(source)
    except (BadVideoError, NoBucketError) as error:
        return QuarantineRow(source.name, str(error), "probe")
    count = min(info.num_samples(fps) // bucket[0], config.max_clips_per_video)
    return [
        Clip(
            source=source,
            source_sha256=sha256,
            bucket=bucket,
            start_seconds=float(Fraction(index * bucket[0]) / fps),
            fps=config.fps,
            index=index,
            is_last=count > 1 and index == count - 1,
        )
        for index in range(count)
    ]
