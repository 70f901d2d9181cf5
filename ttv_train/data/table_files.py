"""Parquet files, and Hugging Face datasets on disk (Arrow files): videos as paths, or as bytes in the table."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ttv_train.data.caption_files import CAPTION_COLUMNS, FILE_COLUMNS, Row, TableCell, first_caption
from ttv_train.errors import UserError

ROWS_AT_ONCE = 1024
MANIFEST_MARK = b"ttv_train.dataset_manifest"
"""In the metadata of the files that `ttv_train.data.dataset_manifest` writes."""
BYTES, PATH = "bytes", "path"
"""Fields of a Hugging Face `Video` or `Image` column."""


def read_table(path: Path, root: Path) -> Iterator[Row]:
    """The rows of a .parquet or .arrow file of the dataset folder `root`; videos that lie in the table are not read.

    Raises:
        UserError: it cannot be read, or has no column for the video or the caption.
    """
    name = path.relative_to(root).as_posix()
    try:
        schema = pq.read_schema(path) if path.suffix == ".parquet" else read_arrow_schema(path)
        video = find_column(schema, (*FILE_COLUMNS, "bytes", "mp4"))
        caption = find_column(schema, CAPTION_COLUMNS)
        if video is None or caption is None:
            wanted = "a video (or file_name, path)" if video is None else "a text (or caption, prompt)"
            raise UserError(f"{path} has no column for {wanted}; its columns are {', '.join(schema.names)}")
        for group, batch_start, batch in read_batches(path, schema, video, caption):
            for offset, columns in enumerate(batch.to_pylist()):
                row = batch_start + offset
                origin = f"{name}:{group}:{row}"
                yield make_row(origin, name, columns, video, caption, TableCell(group, row, video), root)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def is_dataset(path: Path) -> bool:
    """Whether a Parquet file may be a dataset, rather than the manifest of one."""
    try:
        return MANIFEST_MARK not in (pq.read_schema(path).metadata or {})
    except (pa.ArrowInvalid, OSError):
        return True


def make_row(
    origin: str, container: str, columns: dict[str, Any], video: str, caption: str, cell: TableCell, root: Path
) -> Row:
    """One row; the video is in the table unless its path is that of a file of the dataset folder."""
    value = columns.get(video)
    path = value.get(PATH) if isinstance(value, dict) else value
    text = first_caption(columns[caption])
    if isinstance(path, str) and is_file_inside(root, path):
        return Row(origin, path, text)
    if isinstance(value, str):
        return Row(origin, value or None, text, None if value else "no file_name")
    return Row(origin, origin, text, container=container, cell=cell)


def is_file_inside(root: Path, path: str) -> bool:
    """Whether a path is that of a file of the dataset folder."""
    if not path or "\0" in path or ".." in path.split("/"):
        return False
    return (root / path).is_relative_to(root) and (root / path).is_file()


def find_column(schema: pa.Schema, names: tuple[str, ...]) -> str | None:
    """The first of `names` that the table has."""
    return next((name for name in names if name in schema.names), None)


def read_batches(path: Path, schema: pa.Schema, video: str, caption: str) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Row group, number of the first row in it, and rows with the caption and the path, but not the bytes."""
    kind = schema.field(video).type
    if path.suffix == ".parquet":
        columns = [caption]
        if pa.types.is_struct(kind):
            columns += [f"{video}.{PATH}"] if PATH in [field.name for field in kind] else []
        elif not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
            columns.append(video)
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                start = 0
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    yield group, start, batch
                    start += len(batch)
        return
    with pa.memory_map(str(path)) as source:
        for group, batch in enumerate(pa.ipc.open_stream(source)):
            column = batch.column(video)
            if pa.types.is_struct(kind):
                column = (
                    pa.StructArray.from_arrays([column.field(PATH)], [PATH])
                    if kind.get_field_index(PATH) >= 0
                    else None
                )
            elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                column = None
            arrays = {caption: batch.column(caption)} | ({video: column} if column is not None else {})
            yield group, 0, pa.RecordBatch.from_pydict(arrays)


def read_arrow_schema(path: Path) -> pa.Schema:
    """Of a file in Arrow's streaming format, as Hugging Face datasets are saved."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).schema


def read_cell(path: Path, cell: TableCell) -> bytes:
    """The bytes of a video in a table. Raises OSError if there are none."""
    status = path.stat()
    try:
        value = _read_column(path, cell.group, cell.column, (status.st_mtime_ns, status.st_size))[cell.row].as_py()
    except (pa.ArrowInvalid, IndexError, KeyError) as error:
        raise OSError(0, f"row {cell.row} of group {cell.group}: {error}") from None
    if isinstance(value, dict):
        value = value.get(BYTES)
    if not isinstance(value, bytes):
        raise OSError(0, "no bytes of a video in the table, and its path is no file of the dataset folder")
    return value


@lru_cache(maxsize=1)
def _read_column(path: Path, group: int, column: str, version: tuple[int, int]) -> pa.ChunkedArray | pa.Array:
    """One column of a row group; the last one is kept, since rows are read in turn."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group, columns=[column]).column(column)
    source = pa.memory_map(str(path))
    for number, batch in enumerate(pa.ipc.open_stream(source)):
        if number == group:
            return batch.column(column)
    raise IndexError("no such record batch")
