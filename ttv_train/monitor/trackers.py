"""accelerate's trackers without its Accelerator: TensorBoard, Weights & Biases and others, on the main rank only."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from ttv_train.errors import UserError

EXTRAS = ("wandb", "mlflow", "aim")
"""Trackers that are extras of this package under their own name; the others are installed as packages."""


def require_trackers(names: Sequence[str]) -> None:
    """Raises UserError if the package of a tracker cannot be imported here."""
    available = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in available:
            package = f"'ttv-train[{name}]'" if name in EXTRAS else name
            raise UserError(
                f"tracking.trackers names {name}, which is not installed; pip install {package}, or remove it from "
                "the list"
            )


def start_trackers(
    names: Sequence[str], folder: Path, *, run_name: str, hyperparameters: dict[str, Any], resumed_step: int
) -> list[GeneralTracker]:
    """Starts trackers that write under `folder`, or to the service that their environment variables name.

    Args:
        names: trackers of accelerate that `require_trackers` finds.
        folder: where trackers keep their files.
        run_name: name of the run, or of its project where the tracker has projects.
        hyperparameters: scalars and strings by dotted config key.
        resumed_step: steps done before; what TensorBoard has recorded after them is hidden.

    Raises:
        UserError: a tracker does not start, for instance without its credentials.
    """
    _initialize_accelerate()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/mlflow.db")
    arguments: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": folder, "purge_step": resumed_step + 1 if resumed_step else None},
        "aim": {"logging_dir": folder},
        "wandb": {"dir": str(folder)},
        "mlflow": {"logging_dir": (folder / "mlflow").absolute().as_uri()},
        "swanlab": {"logdir": str(folder)},
    }
    trackers = []
    for name in dict.fromkeys(names):
        tracker = LOGGER_TYPE_TO_CLASS[name](run_name, **arguments.get(name, {}))
        try:
            tracker.start()
            tracker.store_init_configuration(hyperparameters)
        except Exception as error:
            raise UserError(
                f"tracking.trackers: {name} does not start: {' '.join(str(error).split())}; mend its environment or "
                "remove it from the list"
            ) from error
        trackers.append(tracker)
    return trackers


def _initialize_accelerate() -> None:
    """Trackers log through accelerate, which wants to know its rank first. `cpu` keeps it from choosing a device; the
    process group that exists already is left alone, and so is the number of threads, which results depend on."""
    num_threads = torch.get_num_threads()
    with warnings.catch_warnings(action="ignore"):
        PartialState(cpu=True)
    torch.set_num_threads(num_threads)
