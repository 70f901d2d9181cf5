"""Whether a checkpoint is what was written: every file of its manifest, with its size and SHA-256."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ttv_train.checkpoint.layout import MANIFEST, PARTS, FileRecord, Manifest, checkpoint_name
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank, world_rank, world_size


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, by file; empty if nothing is. On all ranks, which share the reading."""
    manifest = on_main_rank(lambda: _read_manifest(path))
    if isinstance(manifest, str):
        return [f"{MANIFEST} {manifest}"]
    mine = deal(manifest.files)
    return [problem for problems in on_all_ranks(lambda: _check_files(path, mine)) for problem in problems]


def refuse_damaged(path: Path) -> None:
    """Raises UserError, on all ranks, if a checkpoint that the user named does not verify."""
    problems = verify(path)
    if problems:
        raise UserError(f"checkpoint {path} is refused: {'; '.join(problems)}; use another one")


def hash_files(folder: Path, sizes: dict[str, int]) -> tuple[FileRecord, ...]:
    """Records of files in `folder`, given by relative path and size. On all ranks, which share the reading."""
    mine = deal([FileRecord(path, size, "") for path, size in sizes.items()])
    hashed = on_all_ranks(lambda: [FileRecord(file.path, file.size, _sha256(folder / file.path)) for file in mine])
    return tuple(sorted((record for records in hashed for record in records), key=lambda record: record.path))


def deal(files: Sequence[FileRecord]) -> list[FileRecord]:
    """This rank's part of `files`: about equally many bytes for every rank."""
    return sorted(files, key=lambda file: (-file.size, file.path))[world_rank() :: world_size()]


def _read_manifest(path: Path) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    try:
        manifest = Manifest.parse((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    if path.name.startswith("step-") and path.name != checkpoint_name(manifest.step):
        return f"is of step {manifest.step}"
    # The reader of a part opens every safetensors file that it finds there.
    listed = {file.path for file in manifest.files}
    for part in PARTS:
        for file in sorted((path / part).glob("*.safetensors")):
            if f"{part}/{file.name}" not in listed:
                return f"does not list {part}/{file.name}"
    return manifest


def _check_files(path: Path, files: Sequence[FileRecord]) -> list[str]:
    problems = []
    for file in files:
        try:
            size = (path / file.path).stat().st_size
            if size != file.size:
                problems.append(f"{file.path} has {size} bytes instead of {file.size}")
            elif _sha256(path / file.path) != file.sha256:
                problems.append(f"{file.path} was altered: its SHA-256 is not the manifest's")
        except FileNotFoundError:
            problems.append(f"{file.path} is missing")
        except OSError as error:
            problems.append(f"{file.path} cannot be read: {error.strerror}")
    return problems


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
