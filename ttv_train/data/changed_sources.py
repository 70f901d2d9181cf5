"""Finds the videos that are no longer what was encoded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

DATASET_MANIFEST = "dataset.parquet"
"""In the output folder: what the last scan of the dataset found. From it a rerun knows the videos that have not
changed."""


def changed_sources(manifest: Path, folder: Path, encoded: Mapping[str, str]) -> set[str]:
    """Names of the files in `folder` that are not what was encoded: when they were scanned they had other content, or
    their size or time of change is another by now.

    Files that are gone have not changed: videos may be deleted once they are encoded.

    Args:
        manifest: as `encode` leaves it, also if it was killed after its scan.
        folder: of the dataset.
        encoded: SHA-256 of every video that was encoded, by name.
    """
    changed = set()
    for batch in pq.ParquetFile(manifest).iter_batches(columns=["name", "place", "size", "mtime_ns", "sha256"]):
        for row in batch.to_pylist():
            name = row["name"]
            if name in changed or name not in encoded:
                continue
            if row["sha256"] not in (None, encoded[name]) or _is_touched(folder / name, row):
                changed.add(name)
    return changed


def _is_touched(path: Path, row: Mapping[str, Any]) -> bool:
    # Rows of tables and members of tar files share their file; it is the files of their own that are looked at.
    if row["size"] is None or row["place"]:
        return False
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) != (row["size"], row["mtime_ns"])
