"""Loading: the newest checkpoint that verifies, on any number of ranks."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttv_train.checkpoint.layout import TRAINER, list_checkpoints
from ttv_train.checkpoint.state import materialize_optimizer, model_tensors, optimizer_tensors
from ttv_train.checkpoint.tensors import read_tensors, stored_shapes
from ttv_train.checkpoint.verify import verify
from ttv_train.ema import Ema
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_main_rank, world_rank

logger = logging.getLogger(__name__)


def latest_verified(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` whose every byte is as it was written, or None if there are no checkpoints.

    On all ranks together, which share the reading. Every checkpoint that is refused is named in a warning of rank 0,
    with each damaged file and what is wrong with it.

    Raises:
        UserError: there are checkpoints, and none verifies. Starting anew is then for the user to decide.
    """
    refused = []
    for path in on_main_rank(lambda: list_checkpoints(folder)):
        problems = verify(path)
        if not problems:
            return path
        refused.append(f"{path.name} ({'; '.join(problems)})")
        if world_rank() == 0:
            logger.warning("checkpoint %s is refused: %s", path, "; ".join(problems))
    if refused:
        raise UserError(
            f"no checkpoint in {folder} is intact: {', '.join(refused)}; restore one from a copy, or move them away to "
            "start anew"
        )
    return None


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, Any]:
    """Loads a verified checkpoint in place, on all ranks together, however many wrote it.

    Of the optimizer, its state and its learning rates are restored; the other settings stay as they are configured.

    Returns:
        The trainer state that was saved.

    Raises:
        UserError: the model is not the one that was saved, or there is no average for `ema` to go on from.
    """
    optimizer.state.clear()
    if _has(path, "optimizer"):
        materialize_optimizer(model, optimizer, on_main_rank(lambda: stored_shapes(path / "optimizer")))
    _read(path, "model", model_tensors(model))
    if ema is not None:
        _read(path, "ema", ema.state_dict())
    if optimizer.state:
        _read(path, "optimizer", optimizer_tensors(model, optimizer))
    trainer = on_main_rank(lambda: json.loads((path / TRAINER).read_text(encoding="utf-8")))
    for group, learning_rate in zip(optimizer.param_groups, trainer["learning_rates"], strict=True):
        group["lr"] = learning_rate
    return trainer["state"]


def load_weights(path: Path, model: nn.Module, use_ema: bool) -> None:
    """Loads the weights of a verified checkpoint in place, on all ranks together; the average where one was kept.

    Raises:
        UserError: the model is not the one that was saved.
    """
    tensors = model_tensors(model)
    _read(path, "model", tensors)
    if use_ema and _has(path, "ema"):
        averaged = on_main_rank(lambda: stored_shapes(path / "ema"))
        _read(path, "ema", {name: tensors[name] for name in averaged})
    elif use_ema and world_rank() == 0:
        logger.warning("checkpoint %s keeps no average (ema.enabled was false); using the trained weights", path)


def _has(path: Path, part: str) -> bool:
    return on_main_rank(lambda: (path / part).is_dir())


def _read(path: Path, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors` from a part of the checkpoint after comparing names and shapes with what is stored there."""
    wanted = {name: tensor.shape for name, tensor in tensors.items()}
    on_main_rank(lambda: _refuse_mismatch(path, part, wanted))
    read_tensors(path / part, tensors)


def _refuse_mismatch(path: Path, part: str, wanted: Mapping[str, torch.Size]) -> None:
    if not (path / part).is_dir():
        raise UserError(f"{path} has no {part}, because it was saved with ema.enabled false; set it so again")
    stored = stored_shapes(path / part)
    for name in [*wanted, *stored]:
        found = f"has shape {tuple(stored[name])}" if name in stored else "is not there"
        needed = f"has {tuple(wanted[name])}" if name in wanted else "does not have it"
        if stored.get(name) != wanted.get(name):
            raise UserError(
                f"{path}: {part} tensor {name} {found}, and the model of this config {needed}; the model section must "
                "be the one that was trained"
            )
