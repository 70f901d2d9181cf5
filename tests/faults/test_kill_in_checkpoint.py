"""SIGKILL at every file operation of a save, on real processes: what was committed stays, and what is new is whole."""

import datetime
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.training_parts import Parts, assert_equal
from ttv_train.checkpoint.layout import TEMPORARY_PREFIX, checkpoint_step, list_checkpoints
from ttv_train.checkpoint.load import latest_verified, load_checkpoint
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.checkpoint.verify import verify

fork = multiprocessing.get_context("fork")

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}
SAVED_BEFORE = 2


def trained(step: int) -> Parts:
    parts = Parts(seed=1)
    parts.train(step)
    return parts


def save(folder, step, parts=None):
    parts = trained(step) if parts is None else parts
    save_checkpoint(folder, step, parts.model, parts.optimizer, parts.ema, {"step": step}, keep_last=2)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("committed")
    for step in range(1, SAVED_BEFORE + 1):
        save(folder, step)
    return folder


@pytest.fixture(scope="module")
def states():
    return {step: trained(step).tensors() for step in range(1, SAVED_BEFORE + 3)}


def assert_intact(folder, states, oldest: int) -> int:
    """Every checkpoint in `folder` is whole, and the newest holds the state of its step, which is returned."""
    for path in list_checkpoints(folder):
        assert verify(path) == []
    newest = latest_verified(folder)
    loaded = Parts(seed=9)
    step = load_checkpoint(newest, loaded.model, loaded.optimizer, loaded.ema)["step"]
    assert_equal(loaded.tensors(), states[step])
    assert step >= oldest
    return step


def die_at_file_operation(number: int) -> None:
    """From now on, this process is killed just before its `number`-th file operation; a file about to be written is
    left with half of something in it."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event not in FILE_EVENTS or not isinstance(args[0], str | os.PathLike):
            return
        if event == "open" and str(args[0]).startswith(("/proc", "/sys", "/usr", sys.prefix)):
            return
        count += 1
        if count == number:
            if event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
                descriptor = os.open(args[0], os.O_WRONLY | os.O_CREAT)
                os.write(descriptor, b"\x08\x00\x00\x00\x00\x00\x00\x00{half")
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save_and_die(folder, number):
    parts = trained(SAVED_BEFORE + 1)
    die_at_file_operation(number)
    save(folder, SAVED_BEFORE + 1, parts)


def test_one_process_killed_at_every_file_operation(tmp_path, two_checkpoints, states):
    outcomes = []
    for number in range(1, 500):
        folder = tmp_path / str(number)
        shutil.copytree(two_checkpoints, folder)
        process = fork.Process(target=save_and_die, args=(folder, number))
        process.start()
        process.join()
        outcomes.append(assert_intact(folder, states, oldest=SAVED_BEFORE))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        # The next run goes on, and clears up.
        save(folder, SAVED_BEFORE + 2)
        assert assert_intact(folder, states, oldest=SAVED_BEFORE + 2)
        assert {path.name[:5] for path in folder.iterdir()} == {"step-"}
        shutil.rmtree(folder)
    else:
        pytest.fail("the save never came to its end")
    # Killed before the commit: the old one. Killed after it: the new one. Never the old one again.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(SAVED_BEFORE) > 10
    assert outcomes.count(SAVED_BEFORE + 1) > 3


def save_as_rank(rank, world_size, store, folder, victim, number):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=30),
    )
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the survivor's traceback is expected
    parts = trained(SAVED_BEFORE + 1)
    if rank == victim:
        die_at_file_operation(number)
    save(folder, SAVED_BEFORE + 1, parts)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed(tmp_path, two_checkpoints, victim):
    """The other rank fails instead of hanging, and the checkpoint before is intact."""
    expected = {path.name for path in two_checkpoints.iterdir()}
    draw = random.Random(victim)
    number, killed = 1, 0
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(two_checkpoints, folder)
        ranks = [
            fork.Process(target=save_as_rank, args=(rank, 2, tmp_path / f"store-{number}", folder, victim, number))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        exit_codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        assert None not in exit_codes, f"rank {1 - victim} hangs after rank {victim} died at operation {number}"
        assert all(verify(path) == [] for path in list_checkpoints(folder))
        assert latest_verified(folder).name in {f"step-{SAVED_BEFORE:08d}", f"step-{SAVED_BEFORE + 1:08d}"}
        if exit_codes[victim] == 0:
            assert exit_codes == [0, 0]
            break
        killed += 1
        assert exit_codes[victim] == -signal.SIGKILL
        assert exit_codes[1 - victim] != 0
        assert expected & {path.name for path in folder.iterdir()}
        number += draw.randint(1, 4)
    assert killed >= 3


def save_on_and_on(folder, start):
    """Checkpoints of one step after the other, of a size that makes writing take most of the time."""
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(start, 10**6):
        with torch.no_grad():
            model.weight.fill_(step)
        save_checkpoint(folder, step, model, optimizer, None, {"step": step}, keep_last=2)


def test_killed_at_any_moment(tmp_path):
    draw = random.Random(7)
    newest, interrupted = 0, 0
    for _ in range(8):
        process = fork.Process(target=save_on_and_on, args=(tmp_path, newest + 1))
        process.start()
        while not [path for path in list_checkpoints(tmp_path) if checkpoint_step(path) > newest]:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.join()
        interrupted += any(path.name.startswith(TEMPORARY_PREFIX) for path in tmp_path.iterdir())
        assert all(verify(path) == [] for path in list_checkpoints(tmp_path))
        model = torch.nn.Linear(512, 512)
        step = load_checkpoint(latest_verified(tmp_path), model, torch.optim.AdamW(model.parameters()), None)["step"]
        assert bool((model.weight == step).all())
        assert step > newest
        newest = step
    assert interrupted > 0
