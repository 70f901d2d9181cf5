"""Finds the videos that are no longer what was encoded."""

from pathlib import Path

import pyarrow.parquet as pq

DATASET_MANIFEST = "dataset.parquet"
"""In the output folder: what the last scan of the dataset found. From it a rerun knows the videos that have not
changed."""


def changed_sources(manifest: Path, folder: Path) -> set[str]:
    """Names of the files in `folder` whose size or time of change is another than when they were scanned.

    Files that are gone have not changed: videos may be deleted once they are encoded.

    Args:
        manifest: as `encode` leaves it. Without one nothing is known to have changed.
        folder: of the dataset.
    """
    if not manifest.is_file() or not folder.is_dir():
        return set()
    changed = set()
    for batch in pq.ParquetFile(manifest).iter_batches(columns=["name", "place", "size", "mtime_ns"]):
        for row in batch.to_pylist():
            # Rows of tables and members of tar files share their file; it is the files of their own that are looked at.
            if row["size"] is None or row["place"] or row["name"] in changed:
                continue
            try:
                status = (folder / row["name"]).stat()
            except OSError:
                continue
            if (status.st_size, status.st_mtime_ns) != (row["size"], row["mtime_ns"]):
                changed.add(row["name"])
    return changed
