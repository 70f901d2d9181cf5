"""environment.json: what a run ran on."""

import json
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from ttv_train.storage.partial import write_text

PACKAGES = ("ttv-train", "torch", "diffusers", "transformers", "accelerate", "av")


def write_environment(run_folder: Path, *, backend: str, world_size: int) -> Path:
    """Writes `environment.json`: the command, the machine of rank 0, and package versions.

    Args:
        backend: name of the device backend.
        world_size: processes of the run.
    """
    values = {
        "command": shlex.join(sys.argv),
        "device": backend,
        "processes": world_size,
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }
    return write_text(run_folder / "environment.json", json.dumps(values, indent=2) + "\n")
