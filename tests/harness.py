"""Runs a function on N real gloo ranks.

`run_ranks(4, function, *args)` calls `function(rank, world_size, *args)` in four processes that form a process group,
and returns their results in rank order. The processes are started once and reused by every later call, whatever its
world size; each call gets a process group of its own, over a fresh file store. An exception on a rank is raised here
with the rank's traceback; ranks that do not finish in time are killed and reported with their stacks.
"""

import atexit
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 3.0
"""How long the other ranks may go on after one rank has failed: they usually wait for it in a collective."""


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stack_file: Path


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    port: int
    timeout: float


_workers: list[_Worker] = []
_folder = tempfile.TemporaryDirectory(prefix="ttv-train-ranks-")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _join_group(job: _Job) -> None:
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout),
    )


def _answer(job: _Job) -> tuple[bool, Any, bool]:
    """Whether the job succeeded, its result or traceback, and whether this process can take another one."""
    try:
        _join_group(job)
    except BaseException:
        # Torch has counted a group that the other ranks have not, and would name the next one differently.
        return False, traceback.format_exc(), False
    try:
        # A rank that fails at once must not leave while others are still connecting to it.
        dist.barrier()
        return True, job.function(job.rank, job.world_size, *job.args), True
    except BaseException:
        return False, traceback.format_exc(), True
    finally:
        dist.destroy_process_group()


def _serve(connection: Connection, stack_file: str) -> None:
    """Body of a worker process: one job after the other until the parent closes the pipe."""
    torch.set_num_threads(1)
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            try:
                payload = connection.recv_bytes()
            except EOFError:
                return
            try:
                # Plain pickle copies tensors by value; the default pickler of multiprocessing would share their memory.
                answer = pickle.dumps(_answer(pickle.loads(payload)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc(), True))
            connection.send_bytes(answer)


def _ensure_workers(count: int) -> None:
    # Torch is imported once, in the fork server, and every worker starts from there.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    while len(_workers) < count:
        parent_end, child_end = context.Pipe()
        stack_file = Path(_folder.name) / f"stacks-{time.monotonic_ns()}"
        process = context.Process(target=_serve, args=(child_end, str(stack_file)), daemon=True)
        process.start()
        child_end.close()
        _workers.append(_Worker(process, parent_end, stack_file))


@atexit.register
def _stop_workers() -> None:
    for worker in _workers:
        worker.process.kill()
        worker.connection.close()
    for worker in _workers:
        worker.process.join()
    _workers.clear()


def _stack(worker: _Worker) -> str:
    """Where the Python threads of a worker are now."""
    if not worker.process.is_alive():
        return f"process died with exit code {worker.process.exitcode}"
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    return worker.stack_file.read_text()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls the module-level `function(rank, world_size, *args)` on `world_size` gloo ranks.

    Args and results travel by pickle. `timeout` (seconds) bounds the whole call, and is the process group's timeout.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: a rank raised or died; the message has the traceback of every rank that failed.
        TimeoutError: a rank did not finish; the message has the stacks of the ranks that hang.
    """
    _ensure_workers(world_size)
    workers = _workers[:world_size]
    store = str(Path(_folder.name) / f"store-{time.monotonic_ns()}")
    port = free_port()
    for rank, worker in enumerate(workers):
        worker.connection.send_bytes(pickle.dumps(_Job(function, args, rank, world_size, store, port, timeout)))

    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    all_reusable = True
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < world_size:
        pending = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in {*results, *failures}}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            try:
                succeeded, answer, reusable = pickle.loads(connection.recv_bytes())
            except EOFError:
                workers[rank].process.join(1.0)
                exit_code = workers[rank].process.exitcode
                succeeded, answer, reusable = False, f"process died with exit code {exit_code}", False
            all_reusable &= reusable
            if succeeded:
                results[rank] = answer
            else:
                failures[rank] = answer
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    unfinished = [rank for rank in range(world_size) if rank not in results and rank not in failures]
    stacks = {rank: _stack(workers[rank]) for rank in unfinished}
    if unfinished or not all_reusable:
        _stop_workers()
    if failures:
        raise RankError("\n".join(f"rank {rank} of {world_size}: {failures[rank]}" for rank in sorted(failures)))
    if unfinished:
        listing = "\n".join(f"rank {rank} of {world_size} hangs:\n{stack}" for rank, stack in stacks.items())
        raise TimeoutError(f"no result after {timeout:g} s\n{listing}")
    return [results[rank] for rank in range(world_size)]
