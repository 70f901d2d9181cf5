"""Readers of the caption files of a dataset folder. They read rows and judge nothing but whether a row can be read.

Bytes that are not UTF-8 are kept as lone surrogates, so that a file name in another encoding still names its file and a
broken caption spoils its own row only.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ttv_train.errors import UserError

FILE_COLUMN = "file_name"
CAPTION_COLUMNS = ("text", "caption", "prompt")
MAX_CSV_FIELD_CHARACTERS = 1 << 24


class BadRow(Exception):  # noqa: N818 - says what is wrong with a row; nothing has failed
    """A row that stands for no clip. The message is the reason, in a few words."""


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


def row_of_columns(origin: str, columns: dict[str, Any]) -> Row:
    """A row from named columns; of the caption columns the first one that is there counts."""
    name = columns.get(FILE_COLUMN)
    if not isinstance(name, str) or not name:
        return Row(origin, None, None, f"no {FILE_COLUMN}")
    captions = (columns[column] for column in CAPTION_COLUMNS if columns.get(column) is not None)
    return Row(origin, name, next(captions, None))


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


def read_sidecars(root: Path, videos: Sequence[str], max_bytes: int) -> Iterator[Row]:
    """One row per video, with the text of the .txt file of the same stem."""
    for video in videos:
        sidecar = (root / video).with_suffix(".txt")
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
