"""``ttv-train check-data``: what each file of a dataset folder becomes, or why it is dropped."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ttv_train.config import DatasetConfig, TrainingConfig
from ttv_train.data.buckets import Bucket
from ttv_train.data.check_page import DatasetPage
from ttv_train.data.clips import usable_sources
from ttv_train.data.dataset_manifest import KnownManifest, write_manifest
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.scan import ScannedVideo, scan


@dataclass(frozen=True, slots=True)
class FileReport:
    """One line of the report."""

    name: str
    bucket: str | None
    """FRAMESxHEIGHTxWIDTH; None if the file is dropped."""
    frames: int
    """Frames used, over all clips."""
    clips: int
    reason: str | None
    """Why the file, or the rest of it, is dropped."""


def check_data(
    config: DatasetConfig,
    as_json: bool,
    manifest: Path | None = None,
    html: Path | None = None,
    training: TrainingConfig | None = None,
    batch_sizes: Mapping[Bucket, int] | None = None,
) -> int:
    """Decodes every clip of a dataset and prints what became of each file.

    Args:
        config: the dataset.
        as_json: print JSON instead of a table.
        manifest: write a row per clip and per dropped file to this Parquet file. If it is there, files that have not
            changed since it was written are not read again.
        html: write a page with buckets, contact sheets and everything that is dropped.
        training: whose batches the page counts; None means the defaults.
        batch_sizes: samples of a global batch by bucket; None means the same for all buckets.

    Returns:
        The exit code: 0, or 1 if the dataset or one of its buckets gives no clip to train on.

    Raises:
        UserError: the folder cannot be read as a dataset, or `manifest` is another file.
    """
    reports: list[FileReport] = []
    page = DatasetPage(config, training or TrainingConfig(), batch_sizes or {}) if html is not None else None
    for video in scan_to_manifest(config, manifest, reports):
        reports.append(report_of(video))
        if page is not None:
            page.add(video)
    reports.sort(key=lambda report: (report.name, report.reason or ""))
    if page is not None and html is not None:
        page.write(html, {report.name: report.reason for report in reports if report.reason is not None})
    buckets = dict.fromkeys(sorted(config.buckets), 0)
    for report in reports:
        if report.bucket is not None:
            buckets[report.bucket] += report.clips
    dropped = sum(report.bucket is None for report in reports)
    if as_json:
        print(
            json.dumps(
                {
                    "path": config.path,
                    "clips": sum(buckets.values()),
                    "dropped": dropped,
                    "buckets": buckets,
                    "files": [asdict(report) for report in reports],
                },
                indent=2,
            )
        )
    else:
        print_table(reports, buckets, dropped)
    return 0 if all(buckets.values()) else 1


def scan_to_manifest(config: DatasetConfig, manifest: Path | None, reports: list[FileReport]) -> Iterator[ScannedVideo]:
    """Every video of the dataset, decoded; what is none is added to `reports`, and everything to the manifest."""
    known = KnownManifest.read(manifest, config) if manifest is not None else None
    with nullcontext() if manifest is None else write_manifest(manifest, config) as writer:

        def reject(row: QuarantineRow) -> None:
            reports.append(FileReport(row.name, None, 0, 0, row.reason))
            if writer is not None:
                writer.add_rejected(row)

        videos = scan(usable_sources(config, reject), config, known=known, decode_clips=True)
        for video in tqdm(videos, "decoding", unit="video", disable=None, leave=False, file=sys.stderr):
            if writer is not None:
                writer.add(video, were_decoded=True)
            yield video


def report_of(video: ScannedVideo) -> FileReport:
    """The line of one video."""
    reason = video.reason
    if reason is None and video.bad_clips:
        clip, problem = video.bad_clips[0]
        reason = f"clip {clip.index}: {problem}" if clip.index else problem
    if reason is None and video.dropped_shots:
        reason = "; ".join(video.dropped_shots)
    bucket = "x".join(map(str, video.clips[0].bucket)) if video.clips else None
    frames = sum(clip.bucket[0] for clip in video.clips)
    return FileReport(video.source.name, bucket, frames, len(video.clips), reason)


def print_table(reports: list[FileReport], buckets: dict[str, int], dropped: int) -> None:
    """Prints a line per file, what was dropped for which reason, and a summary."""
    names = [printable(report.name) for report in reports]
    width = min(max(map(len, names), default=0), 60)
    for name, report in zip(names, reports, strict=True):
        if report.bucket is None:
            print(f"{name:{width}}  dropped: {report.reason}")
        else:
            clips = f"{report.clips} clip{'s' * (report.clips != 1)}"
            rest = f"; {report.reason}" if report.reason else ""
            print(f"{name:{width}}  {report.bucket}, {report.frames} frames in {clips}{rest}")
    print()
    for bucket, count in buckets.items():
        empty = "" if count else "; nothing would be trained on in it: remove it, or add videos that fit"
        print(f"bucket {bucket}: {count} clip{'s' * (count != 1)}{empty}")
    print(f"{len(reports)} files, {dropped} dropped, {sum(buckets.values())} clips")


def printable(name: str) -> str:
    """A file name on one line: control characters and bytes that are not UTF-8 are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
