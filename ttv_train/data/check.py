"""``ttv-train check-data``: what each file of a dataset folder becomes, or why it is dropped."""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass

from tqdm import tqdm

from ttv_train.config import DatasetConfig
from ttv_train.data.clips import Clip, list_clips
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import BadVideoError


@dataclass(frozen=True)
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


def check_data(config: DatasetConfig, as_json: bool) -> int:
    """Decodes every clip of a dataset and prints what became of each file.

    Returns:
        The exit code: 0, or 1 if the dataset gives no clip to train on.

    Raises:
        UserError: the folder cannot be read as a dataset.
    """
    reports = report_files(config)
    buckets: Counter[str] = Counter()
    for report in reports:
        if report.bucket is not None:
            buckets[report.bucket] += report.clips
    dropped = sum(report.bucket is None for report in reports)
    if as_json:
        print(
            json.dumps(
                {
                    "path": config.path,
                    "clips": buckets.total(),
                    "dropped": dropped,
                    "buckets": dict(sorted(buckets.items())),
                    "files": [asdict(report) for report in reports],
                },
                indent=2,
            )
        )
    else:
        print_table(reports, buckets, dropped)
    return 0 if buckets else 1


def report_files(config: DatasetConfig) -> list[FileReport]:
    """One report per file or caption row, sorted by name."""
    clips, quarantined = list_clips(config, None)
    reports = [FileReport(row.name, None, 0, 0, row.reason) for row in quarantined]
    good: dict[str, list[Clip]] = {}
    bad: dict[str, str] = {}
    with ClipDecoder(config) as decoder:
        for clip in tqdm(clips, desc="decoding", unit="clip", disable=None, leave=False, file=sys.stderr):
            decoded = good.setdefault(clip.source.name, [])
            try:
                decoder.decode(clip)
            except BadVideoError as error:
                bad.setdefault(clip.source.name, f"clip {clip.index}: {error}" if clip.index else str(error))
            else:
                decoded.append(clip)
    for name, decoded in good.items():
        bucket = "x".join(map(str, decoded[0].bucket)) if decoded else None
        frames = sum(clip.bucket[0] for clip in decoded)
        reports.append(FileReport(name, bucket, frames, len(decoded), bad.get(name)))
    return sorted(reports, key=lambda report: (report.name, report.reason or ""))


def print_table(reports: list[FileReport], buckets: Counter[str], dropped: int) -> None:
    """Prints a line per file and a summary."""
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
    for bucket, count in sorted(buckets.items()):
        print(f"bucket {bucket}: {count} clip{'s' * (count != 1)}")
    print(f"{len(reports)} files, {dropped} dropped, {buckets.total()} clips")


def printable(name: str) -> str:
    """A file name on one line: control characters and bytes that are not UTF-8 are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
