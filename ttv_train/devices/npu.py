"""The Ascend NPU backend, through torch_npu (extra `npu`)."""

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

    def peak_memory_bytes(self) -> int:
        return int(self._npu.max_memory_allocated())
