"""What a checkpoint folder holds, and the manifest that commits it.

    checkpoints/step-00000100/
        model/*.safetensors         every rank's shards of the weights
        ema/*.safetensors           of their average, if one is kept
        optimizer/*.safetensors     of the optimizer's state: PARAMETER.exp_avg, PARAMETER.exp_avg_sq, PARAMETER.step
        trainer.json                the trainer's state and the learning rate of each parameter group
        manifest.json               step, world size, and size and SHA-256 of every other file

A folder named `step-*` was complete when it got that name. Whether it still is, the manifest tells.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
PARTS = ("model", "ema", "optimizer")
TEMPORARY_PREFIX = ".tmp-"

_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(rf"(?:{'|'.join(PARTS)})/[\w.-]+\.safetensors|{re.escape(TRAINER)}")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint folder, with '/' separators."""
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of the whole file."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    world_size: int
    files: tuple[FileRecord, ...]

    def dump(self) -> str:
        """JSON text, with a digest over everything else in it."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**content, "sha256": _digest(content)}, indent=1)

    @classmethod
    def parse(cls, text: str | bytes) -> "Manifest":
        """Reads what `dump` wrote.

        Raises:
            ValueError: the text is not a manifest, was altered, or comes from another version of the format.
        """
        try:
            content = json.loads(text)
            digest = content.pop("sha256")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ValueError("is not a manifest") from None
        if digest != _digest(content):
            raise ValueError("was altered: its own digest does not match")
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"has format version {content['format_version']}; this program reads {FORMAT_VERSION}")
        files = tuple(FileRecord(**record) for record in content["files"])
        for record in files:
            if not _FILE_NAME.fullmatch(record.path):
                raise ValueError(f"lists {record.path!r}, which no checkpoint holds")
        return cls(content["step"], content["world_size"], files)


def _digest(content: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checkpoint_name(step: int) -> str:
    """Name of the folder of `step`."""
    return f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step that a checkpoint's name says.

    Raises:
        ValueError: the name is not a checkpoint's.
    """
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint")
    return int(match[1])


def stored_step(path: Path) -> int:
    """The step of a verified checkpoint, whatever its folder is called."""
    return Manifest.parse((path / MANIFEST).read_bytes()).step


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, damaged ones included, newest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name)), key=checkpoint_step, reverse=True
    )


def write_durably(path: Path, text: str) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
