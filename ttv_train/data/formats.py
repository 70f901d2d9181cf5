"""Dataset folders: which files are clips, and what their captions are. data/README.md describes the layouts."""

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ttv_train.data.caption_files import BadRow, Row, TableCell
from ttv_train.data.layouts import Candidate, find_layouts
from ttv_train.errors import UserError

VIDEO_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("mp4", "m4v", "mov", "3gp", "3g2", "mkv", "webm", "avi", "flv", "wmv", "asf"),
        *("mpg", "mpeg", "vob", "ts", "mts", "m2ts", "ogv", "ogg"),
    )
)
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))
MAX_CAPTION_BYTES = 1 << 16


@dataclass(frozen=True)
class VideoSource:
    """One usable row of a dataset folder."""

    path: Path
    """Absolute, without symbolic links, inside the folder."""
    name: str
    """Relative to the folder, with '/' separators."""
    caption: str
    span: tuple[int, int] | None = None
    """Offset and length of the video in the file, in bytes; None if it is the whole file."""
    cell: TableCell | None = None
    """Where the video lies in the file, if that is a table."""


@dataclass(frozen=True)
class RejectedSource:
    """A row or file that is no clip."""

    name: str
    """Relative to the folder; or FILE:LINE of a row that names no file."""
    reason: str


def read_dataset(
    path: Path, layout: str = "auto", with_images: bool = False
) -> tuple[list[VideoSource], list[RejectedSource]]:
    """All that `iter_dataset` gives, the clips and what is none apart."""
    sources: list[VideoSource] = []
    rejected: list[RejectedSource] = []
    for item in iter_dataset(path, layout, with_images):
        if isinstance(item, VideoSource):
            sources.append(item)
        else:
            rejected.append(item)
    return sources, rejected


def iter_dataset(path: Path, layout: str = "auto", with_images: bool = False) -> Iterator[VideoSource | RejectedSource]:
    """The clips of a dataset folder in the order of its caption file, and everything in it that is not one.

    Only the names of files are held in memory. Rows and files are only looked at inside the folder: `..`, absolute
    paths and symbolic links that lead out of it are rejected, not followed.

    Args:
        path: the folder; or its caption file, tar shard or table, where it has several.
        layout: a name of `dataset.layout`; `auto` takes the only one that fits.
        with_images: take images too, as videos of one frame.

    Raises:
        UserError: there is no such folder; no layout fits, or more than one; a caption file cannot be read.
    """
    if not path.exists() or "\0" in str(path):
        raise UserError(f"dataset.path {str(path)!r}: no such folder; it names the folder of clips and captions")
    root = (path if path.is_dir() else path.parent).resolve()
    suffixes = VIDEO_SUFFIXES | IMAGE_SUFFIXES if with_images else VIDEO_SUFFIXES
    videos = list(find_media(root, suffixes))
    find = partial(find_media, suffixes=suffixes)
    only = None if path.is_dir() else path.name
    chosen = choose_layout(path, layout, list(find_layouts(root, videos, find, suffixes, only)))
    mentioned, used = set(), set()
    for row in chosen.rows():
        name = file_name(row, root)
        mentioned.add(name)
        try:
            source = check_row(row, root, name)
            if name in used:
                raise BadRow("duplicate row")
        except BadRow as bad:
            yield RejectedSource(name, str(bad))
        else:
            used.add(name)
            yield source
    if chosen.names_every_video:
        yield from (RejectedSource(video, "no caption row") for video in videos if video not in mentioned)


def choose_layout(path: Path, layout: str, fitting: list[Candidate]) -> Candidate:
    """The one layout of a folder. UserError if there is none or more than one."""
    if layout != "auto":
        fitting = [candidate for candidate in fitting if candidate.layout == layout]
    if not path.is_dir():
        fitting = [candidate for candidate in fitting if path.name in candidate.files]
        if not fitting:
            raise UserError(f"dataset.path {str(path)!r}: not a caption file, tar shard or table; see data/README.md")
    if not fitting:
        if layout != "auto":
            raise UserError(f"dataset.path {str(path)!r}: no files of dataset.layout {layout}; see data/README.md")
        raise UserError(
            f"dataset.path {str(path)!r}: no captions; give it a metadata.jsonl, a metadata.csv, a videos.txt with "
            "prompts.txt, or a .txt file beside each video (data/README.md shows these and other layouts)"
        )
    if len(fitting) > 1:
        names = ", ".join(str(candidate) for candidate in fitting)
        raise UserError(
            f"dataset.path {str(path)!r}: more than one caption layout fits: {names}; keep one of them, name its "
            "file in dataset.path, or set dataset.layout"
        )
    return fitting[0]


def find_media(root: Path, suffixes: frozenset[str] = VIDEO_SUFFIXES) -> Iterator[str]:
    """Names of the video files in a folder and its subfolders, sorted; hidden ones and linked folders are left out."""
    for parent, folders, files in os.walk(root, followlinks=False):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for file in sorted(files):
            if Path(file).suffix.lower() in suffixes and not file.startswith("."):
                yield Path(parent, file).relative_to(root).as_posix()


def file_name(row: Row, root: Path) -> str:
    """What a row is called: the normal form of the file it names, relative to the folder, or else its place."""
    if not row.name or row.container is not None:
        return row.name or row.origin
    name = posixpath.normpath(row.name)
    inside = f"{root.as_posix()}/"
    return name.removeprefix(inside) if name.startswith(inside) else name


def check_row(row: Row, root: Path, name: str) -> VideoSource:
    """The clip that a row stands for. Raises BadRow with the reason if it stands for none."""
    if row.problem is not None:
        raise BadRow(row.problem)
    if row.container is not None:
        check_name(name)
        path = resolve_inside(root, row.container)
    else:
        path = resolve_inside(root, name)
    return VideoSource(path, name, check_caption(row.caption), row.span, row.cell)


def check_name(name: str) -> None:
    """Raises BadRow for a name that is no path inside the folder."""
    if "\0" in name:
        raise BadRow("NUL byte in the file name")
    if posixpath.isabs(name) or ".." in name.split("/"):
        raise BadRow("path outside the dataset folder")


def resolve_inside(root: Path, name: str) -> Path:
    """The regular file called `name` in the folder `root`. Raises BadRow if it is not there or not in it."""
    check_name(name)
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise BadRow("path outside the dataset folder")
        if not path.exists():
            raise BadRow("no such file")
        if not path.is_file():
            raise BadRow("not a regular file")
    except (OSError, RuntimeError) as error:  # a name that is too long, a loop of links
        raise BadRow(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return path


def check_caption(caption: object) -> str:
    """The caption without surrounding white space. Raises BadRow if there is nothing to learn from."""
    if caption is None:
        raise BadRow("missing caption")
    if not isinstance(caption, str):
        raise BadRow("the caption is not text")
    try:
        num_bytes = len(caption.encode())
    except UnicodeEncodeError:
        raise BadRow("the caption is not valid UTF-8") from None
    if num_bytes > MAX_CAPTION_BYTES:
        raise BadRow(f"the caption has {num_bytes} bytes, more than {MAX_CAPTION_BYTES}")
    if "\0" in caption:
        raise BadRow("NUL byte in the caption")
    if not caption.strip():
        raise BadRow("empty caption")
    return caption.strip()
