"""What differs between accelerators, behind one protocol."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class DeviceBackend(Protocol):
    """One kind of accelerator. Nothing outside ``ttv_train.devices`` calls ``torch.cuda`` or ``torch.npu``."""

    name: str
    """`cuda`, `npu` or `cpu`; also torch's device type."""
    collectives_backend: str
    """Backend of torch.distributed: `nccl`, `hccl` or `gloo`."""

    def device(self, local_rank: int) -> torch.device:
        """The device of this process, made current."""
        ...

    def synchronize(self) -> None:
        """Waits until everything queued on the device has run, so that a wall clock around it tells the truth."""
        ...

    def side_stream(self) -> AbstractContextManager[Any]:
        """Inside it, this thread queues its work on a stream of its own, beside that of the other threads. To be
        entered as often as needed, by one thread at a time. A CPU has no streams."""
        ...

    def peak_memory_bytes(self) -> int:
        """Highest memory in use since the process started: allocated on the device, or resident on a CPU."""
        ...
