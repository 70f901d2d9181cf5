"""Dataset files of musubi-tuner and diffusion-pipe: TOML that names folders of videos with captions beside them.

Only what says where clips and captions are is read; sizes, repeats and buckets are this project's own settings.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttv_train.data.caption_files import Row, read_jsonl, read_sidecars
from ttv_train.errors import UserError

FOLDER_KEYS = ("video_directory", "image_directory", "path")
JSONL_KEYS = ("video_jsonl_file", "image_jsonl_file")
TABLES = ("datasets", "directory")
"""Of musubi-tuner and of diffusion-pipe."""


def is_dataset_toml(path: Path) -> bool:
    """Whether a TOML file names datasets."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return False
    return any(isinstance(content.get(table), list) for table in TABLES)


def read_toml(path: Path, root: Path, find: Callable[[Path], Iterator[str]], max_caption_bytes: int) -> Iterator[Row]:
    """Rows of every dataset that a TOML file names.

    Args:
        path: the file.
        root: the dataset folder, resolved.
        find: lists the videos of a folder by name.
        max_caption_bytes: of a caption file.

    Raises:
        UserError: an entry names neither a folder nor a JSONL file.
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    general = content.get("general", {})
    for table in TABLES:
        for number, entry in enumerate(content.get(table, [])):
            origin = f"{path.name}:{table}[{number}]"
            yield from read_entry({**general, **entry}, origin, root, find, max_caption_bytes)


def read_entry(
    entry: dict[str, Any], origin: str, root: Path, find: Callable[[Path], Iterator[str]], max_caption_bytes: int
) -> Iterator[Row]:
    """Rows of one dataset."""
    named = next((entry[key] for key in (*JSONL_KEYS, *FOLDER_KEYS) if isinstance(entry.get(key), str)), None)
    if named is None:
        raise UserError(f"{root}: {origin} names no folder; give it one of {', '.join((*FOLDER_KEYS, *JSONL_KEYS))}")
    target = (root / named).resolve()
    if not target.is_relative_to(root):
        yield Row(origin, None, None, f"{named}: path outside the dataset folder")
    elif any(key in entry for key in JSONL_KEYS):
        if not target.is_file():
            raise UserError(f"{root}: {origin} names {named}, which is no file")
        for row in read_jsonl(target):
            yield row
    elif target.is_dir():
        prefix = target.relative_to(root)
        suffix = str(entry.get("caption_extension", ".txt"))
        for row in read_sidecars(target, list(find(target)), max_caption_bytes, "." + suffix.lstrip(".")):
            yield replace(row, name=(prefix / row.name).as_posix() if row.name else None)
    else:
        raise UserError(f"{root}: {origin} names {named}, which is no folder")
