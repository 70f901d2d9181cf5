"""Accelerators behind one protocol. `prepare_environment` runs before torch is imported, `get_backend` after."""

import logging
from typing import TYPE_CHECKING

from ttv_train.devices.environment import prepare_environment
from ttv_train.errors import UserError

if TYPE_CHECKING:
    from ttv_train.devices.base import DeviceBackend

__all__ = ["get_backend", "prepare_environment"]

logger = logging.getLogger(__name__)


def get_backend(name: str) -> "DeviceBackend":
    """The backend of a `device.backend` config value.

    Raises:
        UserError: the backend was asked for by name and this machine or this torch build does not have it.
    """
    import torch

    from ttv_train.devices.cpu import CpuBackend
    from ttv_train.devices.cuda import CudaBackend

    resolved = prepare_environment(name)
    if resolved == "cuda":
        if torch.cuda.is_available():
            return CudaBackend()
        reason = "torch sees no CUDA device; check the driver and that torch is a CUDA build"
    elif resolved == "npu":
        try:
            from ttv_train.devices.npu import NpuBackend

            return NpuBackend()
        except ImportError as error:
            reason = f"torch_npu cannot be imported ({error}); install the extra: pip install 'ttv-train[npu]'"
    else:
        return CpuBackend()
    if name == "auto":
        logger.warning("device.backend auto: %s; using the CPU", reason)
        return CpuBackend()
    raise UserError(f"device.backend {name}: {reason}")
