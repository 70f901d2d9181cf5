"""Starts ranks on this machine and calls a function on them, without a launcher."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.devices import get_backend

PRELOADED = ("torch.distributed", "ttv_train.step", "ttv_train.models.build", "ttv_train.diffusion")
"""Imported once, in the process that the ranks are forked from."""
TIMEOUT = timedelta(minutes=5)
"""A collective that takes longer fails on every rank."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, device_backend: str = "cpu") -> list[Any]:
    """Calls the module-level `function(rank, world_size, *args)` on `world_size` ranks that form a process group.

    Args:
        device_backend: `cpu`, `cuda` or `npu`, which decides the collectives; ranks take one device each.

    Returns:
        What each rank returned, in rank order. It travels by pickle, as `args` do.

    Raises:
        BrokenProcessPool: a rank died.
        Exception: what a rank raised, with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with (
        tempfile.TemporaryDirectory(prefix="ttv-train-ranks-") as folder,
        ProcessPoolExecutor(world_size, mp_context=context) as pool,
    ):
        store = str(Path(folder) / "store")
        calls = [
            pool.submit(_call, rank, world_size, store, device_backend, function, args) for rank in range(world_size)
        ]
        return [call.result() for call in calls]


def _call(
    rank: int, world_size: int, store: str, device_backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    backend = get_backend(device_backend)
    backend.device(rank)
    dist.init_process_group(
        backend.collectives_backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
