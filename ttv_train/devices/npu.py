"""The Ascend NPU backend, through torch_npu (extra `npu`)."""

from contextlib import AbstractContextManager
from typing import Any

import torch


class NpuBackend:
    name = "npu"
    collectives_backend = "hccl"

    def __init__(self) -> None:
        import torch_npu

        self._npu: Any = torch_npu.npu

    def device(self, local_rank: int) -> torch.device:
        self._npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def synchronize(self) -> None:
        self._npu.synchronize()

    def side_stream(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._npu.stream(self._npu.Stream())
        return context

    def peak_memory_bytes(self) -> int:
        return int(self._npu.max_memory_allocated())
