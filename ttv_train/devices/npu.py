"""The Ascend NPU backend, through torch_npu (extra `npu`)."""

import torch


class NpuBackend:
    name = "npu"
    collectives_backend = "hccl"

    def __init__(self) -> None:
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401 - registers torch.npu

    def environment(self) -> dict[str, str]:
        return {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}

    def device(self, local_rank: int) -> torch.device:
        torch.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def peak_memory_bytes(self) -> int:
        return int(torch.npu.max_memory_allocated())
