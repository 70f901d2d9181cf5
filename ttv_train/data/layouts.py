"""The layouts of dataset folders, and which of them a folder has. data/README.md describes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ttv_train.data.caption_files import (
    CAPTION_COLUMNS,
    FILE_COLUMNS,
    Row,
    open_text,
    read_csv,
    read_json,
    read_jsonl,
    read_line_files,
    read_sidecars,
)
from ttv_train.data.table_files import is_dataset, read_table
from ttv_train.data.tar_files import read_tar
from ttv_train.data.toml_files import is_dataset_toml, read_toml
from ttv_train.errors import UserError

MAX_SIDECAR_BYTES = 1 << 18
MAX_HEADER_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class Candidate:
    """A layout that a folder has."""

    layout: str
    """As `dataset.layout` has it."""
    files: list[str]
    """By which it is recognised, relative to the folder."""
    rows: Callable[[], Iterator[Row]]
    names_every_video: bool = True
    """Whether videos that no row names are to be reported."""

    def __str__(self) -> str:
        if self.layout == "sidecars":
            return ".txt files beside the videos"
        return " with ".join(self.files) if len(self.files) < 3 else f"{len(self.files)} files as {self.files[0]}"


def find_layouts(
    root: Path,
    videos: Sequence[str],
    find: Callable[[Path], Iterator[str]],
    media_suffixes: frozenset[str],
    only: str | None,
) -> Iterator[Candidate]:
    """Every layout that fits a dataset folder.

    Args:
        root: the folder, resolved.
        videos: names of the videos in it.
        find: lists the videos of a subfolder.
        media_suffixes: of videos, with the dot.
        only: name of the one tar shard or table to read of several.

    Raises:
        UserError: a caption file is a link that leads out of the folder.
    """
    tomls = [name for name in top_files(root, ".toml") if is_dataset_toml(root / name)]
    for name in top_files(root, ".jsonl"):
        # A TOML file may name other JSONL files, or folders of text files.
        if name == "metadata.jsonl" or (not tomls and has_file_column(next(read_jsonl(root / name), None))):
            yield Candidate("jsonl", [name], partial(read_jsonl, root / name))
    for name in top_files(root, ".csv"):
        if name == "metadata.csv" or has_both_columns(root / name):
            yield Candidate("csv", [name], partial(read_csv, root / name))
    for name in ("videos2caption.json", "captions.json", "metadata.json"):
        if is_inside(root, name):
            # FastVideo's caption file stands beside the folder of its videos.
            folder = "videos" if name == "videos2caption.json" and (root / "videos").is_dir() else ""
            yield Candidate("json", [name], partial(read_json, root / name, folder))
    for name in tomls:
        yield Candidate("toml", [name], partial(read_toml, root / name, root, find, MAX_SIDECAR_BYTES))
    if is_inside(root, "videos.txt") and is_inside(root, "prompts.txt"):
        rows = partial(read_line_files, root / "videos.txt", root / "prompts.txt")
        yield Candidate("line_files", ["videos.txt", "prompts.txt"], rows)
    if not tomls and any((root / video).with_suffix(".txt").is_file() for video in videos):
        rows = partial(read_sidecars, root, videos, MAX_SIDECAR_BYTES)
        yield Candidate("sidecars", [], rows)
    shards = only_or_all(only, top_files(root, ".tar"))
    if shards:
        rows = partial(read_all, [partial(read_tar, root / name, media_suffixes) for name in shards])
        yield Candidate("webdataset", shards, rows, names_every_video=False)
    for folder, suffix in table_folders(root):
        files = only_or_all(only, table_files(root / folder, suffix))
        rows = partial(read_all, [partial(read_table, root / folder / name, root) for name in files])
        layout = "parquet" if suffix == ".parquet" else "huggingface"
        yield Candidate(layout, files, rows, names_every_video=False)


def only_or_all(only: str | None, names: list[str]) -> list[str]:
    """The file that was asked for, if it is among them."""
    return [only] if only in names else names


def top_files(folder: Path, suffix: str) -> list[str]:
    """Names of the files of one kind right in a folder, sorted. UserError if one is a link that leads out of it."""
    names = sorted(path.name for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
    return [name for name in names if is_inside(folder, name)]


def is_inside(root: Path, name: str) -> bool:
    """Whether the folder has this file. UserError if it is a link that leads out of the folder."""
    path = root / name
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise UserError(f"{path} is a link out of the dataset folder, which is not followed; copy the file into it")
    return path.is_file()


def has_file_column(row: Row | None) -> bool:
    """Whether the first row of a file names a video."""
    return row is not None and row.name is not None


def has_both_columns(path: Path) -> bool:
    """Whether the first line of a CSV file names a column for the video and one for the caption."""
    with open_text(path) as file:
        header = {column.strip().strip('"') for column in file.readline(MAX_HEADER_CHARACTERS).split(",")}
    return not header.isdisjoint(FILE_COLUMNS) and not header.isdisjoint(CAPTION_COLUMNS)


def table_folders(root: Path) -> Iterator[tuple[str, str]]:
    """Folders, relative to the root, that hold Parquet files, or Arrow files as `datasets.save_to_disk` writes them."""
    for folder in (".", "data"):
        if (root / folder).is_dir() and table_files(root / folder, ".parquet"):
            yield folder, ".parquet"
            break
    for folder in (".", "train"):
        if (root / folder / "dataset_info.json").is_file() and top_files(root / folder, ".arrow"):
            yield folder, ".arrow"
            break


def table_files(folder: Path, suffix: str) -> list[str]:
    """Names of the tables right in a folder."""
    names = top_files(folder, suffix)
    return [name for name in names if is_dataset(folder / name)] if suffix == ".parquet" else names


def read_all(readers: Sequence[Callable[[], Iterator[Row]]]) -> Iterator[Row]:
    """The rows of several files in turn."""
    for reader in readers:
        yield from reader()
