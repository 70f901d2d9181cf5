"""The manifest of a dataset: a Parquet file with a row per usable clip, and a row per video or row that gives none.

A later scan takes from it what it knows of files whose size, time of change and inode are the same.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ttv_train.config import DatasetConfig
from ttv_train.data.cut import Clip
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import VideoInfo
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.scan import ScannedVideo, Stamp
from ttv_train.data.shots import Shot
from ttv_train.data.table_files import MANIFEST_MARK
from ttv_train.errors import UserError
from ttv_train.storage.partial import partial_file

VERSION = 1
ROWS_PER_GROUP = 20_000
GROUPS_HELD = 3
SETTINGS = ("decoder", "max_pixels", "max_video_seconds")
"""What a verdict on a file depends on, besides the file."""
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("reason", pa.string()),
        ("stage", pa.string()),
        ("is_final", pa.bool_()),
        ("caption", pa.string()),
        ("bucket", pa.string()),
        ("clip_index", pa.int32()),
        ("is_last_clip", pa.bool_()),
        ("start_seconds", pa.float64()),
        ("sampled_fps", pa.float64()),
        ("is_decoded", pa.bool_()),
        ("container", pa.string()),
        ("codec", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("rotation", pa.int32()),
        ("num_frames", pa.int64()),
        ("fps", pa.float64()),
        ("duration", pa.float64()),
        ("last_time", pa.string()),
        ("time_base", pa.string()),
        ("pts_digest", pa.string()),
        ("shots", pa.list_(pa.float64())),
        ("sha256", pa.string()),
        ("size", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("inode", pa.uint64()),
        ("place", pa.string()),
    ]
)
"""A row with a `reason` is no clip. In names, bytes that are not UTF-8 are escaped."""
INFO_COLUMNS = ("container", "codec", "width", "height", "rotation", "num_frames", "pts_digest")


class ManifestWriter:
    """Writes a manifest in groups of rows; memory does not grow with their number."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[dict[str, Any]] = []

    def add(self, video: ScannedVideo, were_decoded: bool) -> None:
        """The rows of a video: its clips, its bad clips, or the reason why it has none."""
        shared: dict[str, Any] = {
            "name": printable(video.source.name),
            "caption": video.source.caption,
            "sha256": video.sha256,
        }
        shared |= {"place": place(video.source), "is_final": video.is_final}
        if video.stamp is not None:
            shared |= {"size": video.stamp.size, "mtime_ns": video.stamp.mtime_ns, "inode": video.stamp.inode}
        if video.info is not None:
            shared |= {name: getattr(video.info, name) for name in INFO_COLUMNS}
            shared |= {"last_time": str(video.info.last_time), "time_base": str(video.info.time_base)}
            shared |= {"duration": float(video.info.last_time), "fps": video.info.frame_rate}
        if video.shots is not None:
            shared |= {"shots": [time for shot in video.shots for time in shot]}
        for reason in video.dropped_shots:
            self._add(shared | {"reason": reason, "stage": "probe"})
        for clip in video.clips:
            self._add(shared | clip_columns(clip) | {"is_decoded": were_decoded})
        for clip, reason in video.bad_clips:
            self._add(shared | clip_columns(clip) | {"reason": reason, "stage": "decode"})
        if not video.clips and not video.bad_clips:
            self._add(shared | {"reason": video.reason, "stage": "probe"})

    def add_rejected(self, row: QuarantineRow) -> None:
        """A row for what is no video."""
        self._add({"name": printable(row.name), "reason": row.reason, "stage": row.stage})

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        """Writes what has been added."""
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
            self._rows = []


@contextmanager
def write_manifest(path: Path, config: DatasetConfig) -> Iterator[ManifestWriter]:
    """Writes a manifest; it replaces the one that is there at the end of the body, and only then."""
    schema = SCHEMA.with_metadata({MANIFEST_MARK: json.dumps(settings_of(config))})
    with partial_file(path) as partial:
        with pq.ParquetWriter(partial, schema, compression="zstd") as parquet:
            writer = ManifestWriter(parquet)
            yield writer
            writer.flush()
        partial.replace(path)


def is_final_scan(path: Path) -> bool:
    """Whether a manifest is there, and every verdict in it would be the same at another look."""
    try:
        return bool(pq.read_table(path, columns=["name"], filters=[("is_final", "=", False)]).num_rows == 0)
    except (OSError, pa.ArrowInvalid):
        return False


KEY_COLUMNS = ("name", "size", "mtime_ns", "inode", "place")
"""By which a file is taken for the one that an earlier scan saw."""


class KnownManifest:
    """What the manifest of an earlier scan knows, looked up by file from any thread.

    In memory are 16 bytes a row and the groups of rows that were looked at last: scans take files in the same order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = file = pq.ParquetFile(path)
        self._reading = threading.Lock()
        self._group = lru_cache(GROUPS_HELD)(self._read_group)
        keys = [
            np.fromiter((file_key(*row.values()) for row in self._read_columns(group, KEY_COLUMNS)), dtype=np.uint64)
            for group in range(file.num_row_groups)
        ]
        self._starts = np.cumsum([0, *map(len, keys)])
        self._keys = np.concatenate([*keys, np.empty(0, dtype=np.uint64)])
        self._order = np.argsort(self._keys, kind="stable")

    @classmethod
    def read(cls, path: Path, config: DatasetConfig) -> "KnownManifest | None":
        """The manifest at `path`; None if there is none, or one of other settings.

        Raises:
            UserError: it is no manifest.
        """
        if not path.exists():
            return None
        try:
            metadata = pq.read_schema(path).metadata or {}
            if json.loads(metadata.get(MANIFEST_MARK, b"null")) != settings_of(config):
                return None
            return cls(path)
        except (pa.ArrowInvalid, ValueError, KeyError) as error:
            raise UserError(f"{path} is no manifest of a dataset: {str(error)[:100]}; remove it") from None

    def find(self, source: VideoSource, stamp: Stamp) -> ScannedVideo | None:
        """See `scan.KnownVideos`."""
        for row in self._rows(source, stamp):
            if row["last_time"] is not None:
                fields = {name: row[name] for name in INFO_COLUMNS}
                fields |= {name: Fraction(row[name]) for name in ("last_time", "time_base")}
                times = row["shots"]
                shots = None if times is None else list(map(Shot, times[::2], times[1::2]))
                return ScannedVideo(source, stamp, VideoInfo(**fields), row["sha256"], None, shots=shots)
            if row["is_final"]:
                return ScannedVideo(source, stamp, None, "", row["reason"])
        return None

    def is_decoded(self, source: VideoSource, stamp: Stamp, clip: Clip) -> bool:
        """See `scan.KnownVideos`."""
        wanted = clip_columns(clip)
        return any(
            row["is_decoded"] and all(row[name] == value for name, value in wanted.items())
            for row in self._rows(source, stamp)
        )

    def _rows(self, source: VideoSource, stamp: Stamp) -> Iterator[dict[str, Any]]:
        parts = (printable(source.name), stamp.size, stamp.mtime_ns, stamp.inode, place(source))
        key = np.uint64(file_key(*parts))
        first = int(np.searchsorted(self._keys, key, sorter=self._order))
        for position in range(first, len(self._order)):
            number = int(self._order[position])
            if self._keys[number] != key:
                return
            group = int(np.searchsorted(self._starts, number, side="right")) - 1
            row = self._group(group).slice(number - int(self._starts[group]), 1).to_pylist()[0]
            if tuple(row[name] for name in KEY_COLUMNS) == parts:
                yield row

    def _read_group(self, group: int) -> pa.Table:
        try:
            with self._reading:
                return self._file.read_row_group(group, [name for name in SCHEMA.names if name != "caption"])
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{self._path} is damaged: {str(error)[:100]}; remove it") from None

    def _read_columns(self, group: int, columns: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._file.read_row_group(group, columns).select(columns).to_pylist()
        return rows


def file_key(*parts: str | int | None) -> int:
    """A 64-bit digest of what identifies an unchanged file."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def clip_columns(clip: Clip) -> dict[str, Any]:
    """The columns that describe a clip."""
    return {
        "bucket": "x".join(map(str, clip.bucket)),
        "clip_index": clip.index,
        "is_last_clip": clip.is_last,
        "start_seconds": clip.start_seconds,
        "sampled_fps": clip.fps,
    }


def place(source: VideoSource) -> str:
    """Where a video lies inside of its file; empty if it is the file."""
    if source.cell is not None:
        return f"{source.cell.column}:{source.cell.group}:{source.cell.row}"
    return "" if source.span is None else f"{source.span[0]}+{source.span[1]}"


def printable(name: str) -> str:
    """A file name as text: bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def settings_of(config: DatasetConfig) -> dict[str, Any]:
    """What has to be the same for a verdict to hold."""
    return {"version": VERSION} | {name: getattr(config, name) for name in SETTINGS}
