"""The CPU backend: gloo collectives, for tests, demos and encoding without an accelerator."""

import resource
from contextlib import AbstractContextManager, nullcontext

import torch


class CpuBackend:
    name = "cpu"
    collectives_backend = "gloo"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
