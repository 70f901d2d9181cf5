"""The ranks of a run and the two axes they form: data x sequence."""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ttv_train.config import ParallelConfig
from ttv_train.devices.base import DeviceBackend
from ttv_train.errors import UserError


@dataclass(frozen=True)
class ParallelMesh:
    """Where this process stands. Consecutive ranks share a sequence, so that its exchanges stay inside a node."""

    device: torch.device
    rank: int
    world_size: int
    data_rank: int
    data_degree: int
    sequence_rank: int
    sequence_degree: int
    mesh: DeviceMesh
    """Two-dimensional, axes `data` and `sequence`."""
    world: DeviceMesh
    """The same ranks flattened, over which parameters are sharded."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("sequence")


def check_degrees(config: ParallelConfig, world_size: int) -> None:
    """Raises UserError when `parallel.sequence.degree` does not divide the number of ranks."""
    degree = config.sequence.degree
    if world_size % degree:
        hint = ""
        if world_size < degree:
            hint = (
                "; note that `accelerate launch --cpu --num_processes N` starts one process: use "
                f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_machines 1 --num_processes {degree}"
            )
        raise UserError(
            f"parallel.sequence.degree {degree} does not divide the {world_size} process(es) of this run; start a "
            f"multiple of {degree} processes or change the degree{hint}"
        )


@contextmanager
def distributed(backend: DeviceBackend, timeout_seconds: float) -> Iterator[torch.device]:
    """Joins the process group that the launcher describes (accelerate and torchrun set the same variables), or forms a
    group of one without a launcher; leaves it at the end. Yields this process's device."""
    device = backend.device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if is_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with process_group(backend, timedelta(seconds=timeout_seconds), **alone):
        yield device


def is_launched() -> bool:
    """Whether a launcher has started this process as one of a job."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextmanager
def process_group(backend: DeviceBackend, timeout: timedelta, **ranks: Any) -> Iterator[None]:
    """The default process group; `ranks` are further arguments of `init_process_group`."""
    dist.init_process_group(backend.collectives_backend, timeout=timeout, **ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Gloo's threads end when the last reference to their group is gone. One that lets go of a tensor after Python
        # has begun to exit aborts the process, so what holds groups in reference cycles is collected before that.
        atexit.register(gc.collect)


def consecutive_ranks(size: int, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A group of the `size` consecutive ranks that this one is of. All ranks, a multiple of `size`, call it together.

    Args:
        timeout: of its collectives.
        backend: of torch.distributed; None for that of the default group.
    """
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size)), timeout, backend) for start in starts]
    return groups[dist.get_rank() // size]


def build_mesh(config: ParallelConfig, device: torch.device) -> ParallelMesh:
    """Lays the initialized process group out as data x sequence.

    Raises:
        UserError: the degrees do not fit the number of ranks.
    """
    world_size = dist.get_world_size()
    check_degrees(config, world_size)
    degree = config.sequence.degree
    mesh = init_device_mesh(device.type, (world_size // degree, degree), mesh_dim_names=("data", "sequence"))
    return ParallelMesh(
        device=device,
        rank=dist.get_rank(),
        world_size=world_size,
        data_rank=mesh.get_local_rank("data"),
        data_degree=world_size // degree,
        sequence_rank=mesh.get_local_rank("sequence"),
        sequence_degree=degree,
        mesh=mesh,
        world=mesh._flatten("world"),
    )
