"""The CPU backend: gloo collectives, for tests, demos and encoding without an accelerator."""

import resource

import torch


class CpuBackend:
    name = "cpu"
    collectives_backend = "gloo"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
