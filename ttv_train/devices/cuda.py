"""The CUDA backend (NVIDIA GPUs; AMD GPUs under ROCm answer to the same calls)."""

from contextlib import AbstractContextManager

import torch


class CudaBackend:
    name = "cuda"
    collectives_backend = "nccl"

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def side_stream(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(torch.cuda.Stream())

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()
