"""Whether a job has anything to do, told in seconds for a dataset of any size: nothing that decides what it does has
changed since the last commit.

The state of a dataset is the name, size, time of change and inode of every file in it. The job notes the state that it
found, with the settings and the digest of the manifest that it committed, in `encoded.json` of its output folder.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ttv_train.config import DatasetConfig
from ttv_train.data.manifest import DamagedStoreError, Manifest, is_intact, read_manifest, stored_objects
from ttv_train.storage import Store
from ttv_train.storage.partial import write_text

NOTE = "encoded.json"


@dataclass(frozen=True)
class Finished:
    """What a finished job notes."""

    state: str
    """Of the dataset and the settings, before the job looked at them."""
    manifest: str
    """SHA-256 of what it committed."""


def state_of(dataset: DatasetConfig, fingerprints: Iterable[str]) -> str:
    """Digest of all that decides what a job does, but for the store: the dataset's files and settings, the encoders."""
    path = Path(dataset.path)
    digest = hashlib.sha256(json.dumps([dataset.model_dump(mode="json"), *fingerprints]).encode())
    for folder, folders, _ in os.walk(path if path.is_dir() else path.parent):
        folders.sort()
        with os.scandir(folder) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                status = entry.stat(follow_symlinks=not entry.is_dir())
                place = os.path.join(folder, entry.name)  # noqa: PTH118 - a Path would take longer than the file's status
                kind = (0, 0) if entry.is_dir() else (status.st_size, status.st_mtime_ns)
                digest.update(f"{place!r} {kind} {status.st_ino}\n".encode())
    return digest.hexdigest()


def finished_before(output_dir: Path, store: Store, state: str) -> Manifest | None:
    """The committed manifest, if an earlier job found the same state and all that it stored is there."""
    try:
        finished = Finished(**json.loads((output_dir / NOTE).read_text()))
        manifest, digest = read_manifest(store)
    except (OSError, ValueError, TypeError, DamagedStoreError):
        return None
    if finished != Finished(state, digest):
        return None
    is_whole = all(is_intact(store, stored) for stored in (manifest.index, manifest.null_prompt))
    is_whole = is_whole and len(stored_objects(store, manifest.shards)) == len(manifest.shards)
    return manifest if is_whole else None


def note_finished(output_dir: Path, store: Store, state: str) -> None:
    """Notes that a job that found `state` has committed what is in the store now."""
    _, digest = read_manifest(store)
    write_text(output_dir / NOTE, json.dumps(asdict(Finished(state, digest))))


def forget_finished(output_dir: Path) -> None:
    """Has the next job look at everything again."""
    (output_dir / NOTE).unlink(missing_ok=True)
