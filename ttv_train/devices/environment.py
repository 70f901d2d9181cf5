"""What must be decided before torch is imported: which backend, and the allocator's environment.

torch reads its allocator settings when it is loaded, so this module looks at device files instead of asking torch.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

DEVICE_FILES = {"cuda": ("/dev/nvidiactl", "/dev/kfd"), "npu": ("/dev/davinci_manager",)}
ALLOCATOR_VARIABLES = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}


def detect_backend() -> str:
    """The first of `cuda`, `npu` and `cpu` whose device files this machine has."""
    for name, files in DEVICE_FILES.items():
        if any(Path(file).exists() for file in files):
            return name
    return "cpu"


def prepare_environment(name: str, environ: MutableMapping[str, str] | None = None) -> str:
    """Resolves `auto` and turns expandable segments on in the backend's allocator.

    Buckets change the tensor shapes from step to step, which fragments an allocator of fixed-size segments. What the
    user has set in the allocator's variable is kept; the option is added unless the user decided on it.

    Returns:
        The backend's name: `cuda`, `npu` or `cpu`.
    """
    environ = os.environ if environ is None else environ
    resolved = detect_backend() if name == "auto" else name
    variable = ALLOCATOR_VARIABLES.get(resolved)
    if variable is not None:
        options = [option for option in environ.get(variable, "").split(",") if option]
        if not any(option.startswith("expandable_segments:") for option in options):
            environ[variable] = ",".join([*options, "expandable_segments:True"])
    return resolved
