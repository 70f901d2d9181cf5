"""Saving: a checkpoint exists entirely or not at all, whatever dies when.

1. Everything is written into `.tmp-*` beside the checkpoints, each file synced to disk.
2. When all ranks have written, the files are hashed and rank 0 writes the manifest.
3. Rank 0 renames the folder to `step-*` and syncs the parent: this is the commit.
4. Only then are older checkpoints removed.
"""

import json
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttv_train.checkpoint.layout import (
    MANIFEST,
    TEMPORARY_PREFIX,
    TRAINER,
    Manifest,
    checkpoint_name,
    sync_folder,
    write_durably,
)
from ttv_train.checkpoint.retention import keep_newest, remove_folder, remove_leftovers, set_aside
from ttv_train.checkpoint.state import model_tensors, optimizer_tensors
from ttv_train.checkpoint.tensors import stored_shapes, write_tensors
from ttv_train.checkpoint.verify import hash_files
from ttv_train.ema import Ema
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank, world_rank, world_size


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    trainer_state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Writes the checkpoint of `step` into `folder` and removes all but the newest `keep_last`; on all ranks together.

    A checkpoint of the same step is replaced. Only the run that holds the lock of its output folder may call this.

    Args:
        folder: on a file system that all nodes share; made if it is not there.
        trainer_state: anything that JSON holds exactly.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: on every rank, if any rank could not write. Earlier checkpoints are then still there.
    """
    tensors = {"model": model_tensors(model)}
    if ema is not None:
        tensors["ema"] = ema.state_dict()
    if optimizer.state:
        tensors["optimizer"] = optimizer_tensors(model, optimizer)
    trainer = {"state": trainer_state, "learning_rates": [float(group["lr"]) for group in optimizer.param_groups]}
    try:
        temporary = on_main_rank(lambda: _make_temporary(folder, step))
        try:
            checkpoint = _write(temporary, step, tensors, trainer)
        except Exception:
            # All ranks have given up together; on a full disk the space is needed.
            if world_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(
            f"{folder / checkpoint_name(step)} could not be written ({error}); earlier checkpoints are intact: free "
            "space on the file system of output_dir or mend it, then start again"
        ) from error
    keep_newest(checkpoint, keep_last)
    return checkpoint


def _write(temporary: Path, step: int, tensors: dict[str, dict[str, torch.Tensor]], trainer: dict[str, Any]) -> Path:
    on_all_ranks(lambda: _refuse_unshared(temporary))
    for part, values in tensors.items():
        write_tensors(temporary / part, values)
        shapes = {name: tensor.shape for name, tensor in values.items()}
        on_main_rank(partial(_refuse_incomplete, temporary / part, shapes))
    on_main_rank(lambda: write_durably(temporary / TRAINER, json.dumps(trainer, indent=1)))
    sizes = on_main_rank(lambda: _file_sizes(temporary))
    manifest = Manifest(step, world_size(), hash_files(temporary, sizes))
    return on_main_rank(lambda: _commit(temporary, manifest))


def _make_temporary(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    # A name of its own: a rank that outlives a killed run must not write into the folder of the next one.
    temporary = folder / f"{TEMPORARY_PREFIX}{checkpoint_name(step)}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def _refuse_unshared(temporary: Path) -> None:
    if not temporary.is_dir():
        raise UserError(
            f"output_dir: a folder made by rank 0 is not seen by all ranks ({temporary}); use a shared disk"
        )


def _refuse_incomplete(folder: Path, shapes: dict[str, torch.Size]) -> None:
    if stored_shapes(folder) != shapes:
        raise UserError(f"output_dir: rank 0 does not see what other ranks wrote to {folder}; use a shared disk")


def _file_sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _commit(temporary: Path, manifest: Manifest) -> Path:
    """Makes a complete temporary folder the checkpoint of its step."""
    write_durably(temporary / MANIFEST, manifest.dump())
    for part in {(temporary / file.path).parent for file in manifest.files} | {temporary}:
        sync_folder(part)
    checkpoint = temporary.parent / checkpoint_name(manifest.step)
    # There is one already if it was refused when the run resumed from an older one.
    replaced = set_aside(checkpoint) if checkpoint.exists() else None
    temporary.rename(checkpoint)
    sync_folder(checkpoint.parent)
    if replaced is not None:
        remove_folder(replaced)
    return checkpoint
