"""Dataset folders: which files are clips, and what their captions are. data/README.md describes the layouts."""

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ttv_train.data.caption_files import BadRow, Row, read_csv, read_jsonl, read_line_files, read_sidecars
from ttv_train.errors import UserError

VIDEO_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("mp4", "m4v", "mov", "3gp", "3g2", "mkv", "webm", "avi", "flv", "wmv", "asf"),
        *("mpg", "mpeg", "vob", "ts", "mts", "m2ts", "ogv", "ogg"),
    )
)
MAX_CAPTION_BYTES = 1 << 16


@dataclass(frozen=True)
class VideoSource:
    """One usable row of a dataset folder."""

    path: Path
    """Absolute, without symbolic links, inside the folder."""
    name: str
    """Relative to the folder, with '/' separators."""
    caption: str


@dataclass(frozen=True)
class RejectedSource:
    """A row or file that is no clip."""

    name: str
    """Relative to the folder; or FILE:LINE of a row that names no file."""
    reason: str


def read_dataset(folder: Path) -> tuple[list[VideoSource], list[RejectedSource]]:
    """The clips of a dataset folder in the order of its caption file, and everything in it that is not one.

    Rows and files are only looked at inside the folder: `..`, absolute paths and symbolic links that lead out of it are
    rejected, not followed.

    Raises:
        UserError: there is no such folder; no layout fits, or more than one; videos.txt and prompts.txt do not match.
    """
    if not folder.is_dir():
        raise UserError(f"dataset.path {str(folder)!r}: no such folder; it names the folder of clips and captions")
    root = folder.resolve()
    videos = list(find_videos(root))
    sources: dict[str, VideoSource] = {}
    rejected = []
    mentioned = set()
    for row in read_rows(folder, root, videos):
        name = posixpath.normpath(row.name) if row.name else row.origin
        mentioned.add(name)
        try:
            source = check_row(row, root, name)
            if name in sources:
                raise BadRow("duplicate row")
        except BadRow as bad:
            rejected.append(RejectedSource(name, str(bad)))
        else:
            sources[name] = source
    rejected += [RejectedSource(video, "no caption row") for video in videos if video not in mentioned]
    return list(sources.values()), rejected


def read_rows(folder: Path, root: Path, videos: list[str]) -> Iterator[Row]:
    """The rows of the one layout that fits."""
    fitting = []
    if has_caption_file(root, "metadata.jsonl"):
        fitting.append(("metadata.jsonl", read_jsonl(root / "metadata.jsonl")))
    if has_caption_file(root, "metadata.csv"):
        fitting.append(("metadata.csv", read_csv(root / "metadata.csv")))
    if has_caption_file(root, "videos.txt") and has_caption_file(root, "prompts.txt"):
        fitting.append(("videos.txt with prompts.txt", read_line_files(root / "videos.txt", root / "prompts.txt")))
    if any((root / video).with_suffix(".txt").is_file() for video in videos):
        fitting.append((".txt files beside the videos", read_sidecars(root, videos, 4 * MAX_CAPTION_BYTES)))
    if not fitting:
        raise UserError(
            f"dataset.path {str(folder)!r}: no captions; give it a metadata.jsonl, a metadata.csv, a videos.txt with "
            "prompts.txt, or a .txt file beside each video (data/README.md shows each)"
        )
    if len(fitting) > 1:
        names = ", ".join(name for name, _ in fitting)
        raise UserError(f"dataset.path {str(folder)!r}: more than one caption layout fits: {names}; keep one of them")
    return fitting[0][1]


def has_caption_file(root: Path, name: str) -> bool:
    """Whether the folder has this caption file. UserError if it is a link that leads out of the folder."""
    path = root / name
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise UserError(f"{path} is a link out of the dataset folder, which is not followed; copy the file into it")
    return path.is_file()


def find_videos(root: Path) -> Iterator[str]:
    """Names of the video files in a folder and its subfolders, sorted; hidden ones and linked folders are left out."""
    for parent, folders, files in os.walk(root, followlinks=False):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for file in sorted(files):
            if Path(file).suffix.lower() in VIDEO_SUFFIXES and not file.startswith("."):
                yield Path(parent, file).relative_to(root).as_posix()


def check_row(row: Row, root: Path, name: str) -> VideoSource:
    """The clip that a row stands for. Raises BadRow with the reason if it stands for none."""
    if row.problem is not None:
        raise BadRow(row.problem)
    path = resolve_inside(root, row.name)
    return VideoSource(path, name, check_caption(row.caption))


def resolve_inside(root: Path, name: str | None) -> Path:
    """The regular file called `name` in the folder `root`. Raises BadRow if it is not there or not in it."""
    assert name, "a row without a name has a problem"
    if "\0" in name:
        raise BadRow("NUL byte in the file name")
    if posixpath.isabs(name) or ".." in name.split("/"):
        raise BadRow("path outside the dataset folder")
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
