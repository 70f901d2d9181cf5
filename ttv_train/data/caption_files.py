"""Readers of the caption files of a dataset folder. They read rows and judge nothing but whether a row can be read.

Bytes that are not UTF-8 are kept as lone surrogates, so that a file name in another encoding still names its file and a
broken caption spoils its own row only.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ttv_train.errors import UserError

FILE_COLUMN = "file_name"
FILE_COLUMNS = (FILE_COLUMN, "path", "video", "video_path", "image_path", "media_path", "file_path", "image")
CAPTION_COLUMNS = ("text", "caption", "prompt", "cap")
MAX_CSV_FIELD_CHARACTERS = 1 << 24
MAX_JSON_BYTES = 1 << 30


class BadRow(Exception):  # noqa: N818 - says what is wrong with a row; nothing has failed
    """A row that stands for no clip. The message is the reason, in a few words."""


@dataclass(frozen=True)
class TableCell:
    """A video that lies in a table, as bytes."""

    group: int
    """Number of the row group of a Parquet file, or of the record batch of an Arrow file."""
    row: int
    """Number of the row in it."""
    column: str


@dataclass(frozen=True)
class Row:
    """One row of a caption file, as it is written there."""

    origin: str
    """FILE:LINE."""
    name: str | None
    """The video it names, relative to the dataset folder."""
    caption: Any
    problem: str | None = None
    """Why the row cannot be read at all."""
    container: str | None = None
    """The file that holds the video, if the video is no file of its own."""
    span: tuple[int, int] | None = None
    """Offset and length of the video in `container`, in bytes."""
    cell: TableCell | None = None
    """Where it lies in `container`, if that is a table."""


def row_of_columns(origin: str, columns: dict[str, Any]) -> Row:
    """A row from named columns; of the columns for the file and for the caption the first one that is there counts."""
    name = next((columns[column] for column in FILE_COLUMNS if columns.get(column) is not None), None)
    if not isinstance(name, str) or not name:
        return Row(origin, None, None, f"no {FILE_COLUMN}")
    captions = (columns[column] for column in CAPTION_COLUMNS if columns.get(column) is not None)
    return Row(origin, name, first_caption(next(captions, None)))


def first_caption(captions: Any) -> Any:
    """Of several captions the first one."""
    return captions[0] if isinstance(captions, list) and captions else captions


def open_text(path: Path) -> TextIO:
    """Opens a caption file without translating its line ends."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def read_jsonl(path: Path) -> Iterator[Row]:
    """Rows of a file with one JSON object a line."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path.name}:{number}"
            try:
                columns = json.loads(line.strip())
            except json.JSONDecodeError as error:
                yield Row(origin, None, None, f"malformed JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError):
                yield Row(origin, None, None, "malformed JSON: a number too long or brackets too deep")
            else:
                if isinstance(columns, dict):
                    yield row_of_columns(origin, columns)
                else:
                    yield Row(origin, None, None, "not a JSON object")


def read_csv(path: Path) -> Iterator[Row]:
    """Rows of a comma-separated file whose first row names the columns."""
    previous_limit = csv.field_size_limit(MAX_CSV_FIELD_CHARACTERS)
    try:
        with open_text(path) as file:
            reader = csv.reader(file, strict=True)
            header: list[str] = []
            while True:
                origin = f"{path.name}:{reader.line_num + 1}"
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield Row(origin, None, None, f"malformed CSV: {error}")
                    continue
                if not values:
                    continue
                if not header:
                    header = [column.strip() for column in values]
                    continue
                columns = dict(zip(header, values, strict=False))
                row = row_of_columns(origin, columns)
                if row.problem is None and len(values) != len(header):
                    problem = f"{len(values)} columns where the header has {len(header)}; quote captions with commas"
                    row = Row(origin, row.name, None, problem)
                yield row
    finally:
        csv.field_size_limit(previous_limit)


def read_json(path: Path, folder: str = "") -> Iterator[Row]:
    """Rows of a file that is one JSON value: a list of objects, as FastVideo's videos2caption.json, or an object from
    file names to captions, as diffusion-pipe's captions.json.

    Args:
        path: the file.
        folder: what the names are relative to, seen from the dataset folder; they may begin with it as well.

    Raises:
        UserError: it is too large, no JSON, or neither of these.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path} has more than {MAX_JSON_BYTES >> 30} GiB; use one JSON object a line (.jsonl)")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig", errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {str(error)[:100]}") from None
    if isinstance(content, dict):
        for name, caption in content.items():
            yield Row(path.name, name, first_caption(caption)) if name else Row(path.name, None, None, "an empty name")
    elif isinstance(content, list):
        for number, columns in enumerate(content):
            origin = f"{path.name}:{number}"
            if isinstance(columns, dict):
                row = row_of_columns(origin, columns)
                if folder and row.name and not row.name.startswith((f"{folder}/", "/")):
                    row = replace(row, name=f"{folder}/{row.name}")
                yield row
            else:
                yield Row(origin, None, None, "not a JSON object")
    else:
        raise UserError(f"{path} is neither a list of objects nor an object of captions by file name")


def read_line_files(videos: Path, prompts: Path) -> Iterator[Row]:
    """Rows of two files whose lines belong together. UserError if they have not the same number of lines."""
    names, captions = (read_lines(path) for path in (videos, prompts))
    if len(names) != len(captions):
        raise UserError(
            f"{videos} has {len(names)} lines and {prompts} has {len(captions)}; give each video its line of captions"
        )
    for number, (name, caption) in enumerate(zip(names, captions, strict=True), start=1):
        origin = f"{videos.name}:{number}"
        yield Row(origin, name, caption) if name else Row(origin, None, None, "an empty line")


def read_lines(path: Path) -> list[str]:
    """Lines of a text file without surrounding white space; empty ones at its end are not counted."""
    with open_text(path) as file:
        lines = [line.strip() for line in file.read().split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def read_sidecars(root: Path, videos: Sequence[str], max_bytes: int, suffix: str = ".txt") -> Iterator[Row]:
    """One row per video, with the text of the file of the same stem and the given suffix."""
    for video in videos:
        sidecar = (root / video).with_suffix(suffix)
        origin = sidecar.relative_to(root).as_posix()
        if not sidecar.exists():
            yield Row(origin, video, None)
        elif not sidecar.resolve().is_relative_to(root):
            yield Row(origin, video, None, "the caption file is a link out of the dataset folder")
        elif not sidecar.is_file():
            yield Row(origin, video, None, "the caption file is not a regular file")
        elif sidecar.stat().st_size > max_bytes:
            yield Row(origin, video, None, f"the caption file has more than {max_bytes} bytes")
        else:
            with open_text(sidecar) as file:
                yield Row(origin, video, file.read())
