"""Weights as a diffusers folder, which `from_pretrained` loads without this project."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from ttv_train.checkpoint.layout import TEMPORARY_PREFIX, sync_folder
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_main_rank
from ttv_train.parallel.parameters import parameters_at_rest


def export(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the weights that a diffusers `model` has now to a new `folder`; on all ranks together, sharded or not.

    Rank 0 holds the whole model in host memory. For the average, load it first (`load_weights`) or call this inside
    `Ema.applied`.

    Args:
        dtype: type of floating-point weights in the files.

    Returns:
        The folder: config.json and diffusion_pytorch_model*.safetensors.

    Raises:
        UserError: on every rank, if the folder exists or cannot be written.
    """
    on_main_rank(lambda: _refuse_existing(folder))
    parameters_at_rest(model)
    # Gathered tensor by tensor; complete on rank 0, empty on the others.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    try:
        on_main_rank(lambda: _write(model, weights, folder, dtype))
    except OSError as error:
        raise UserError(f"the export to {folder} failed ({error}); free space or choose another folder") from error
    return folder


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder} exists; export writes a new folder: choose another one or remove it")


def _write(model: nn.Module, weights: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    # fully_shard has replaced the class of the model by a subclass, which diffusers does not know.
    model_class: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    with torch.device("meta"):
        plain = model_class.from_config(model.config)
    plain.load_state_dict(weights, assign=True)
    plain.to(dtype)
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-{secrets.token_hex(4)}")
    plain.save_pretrained(temporary, safe_serialization=True)
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)
