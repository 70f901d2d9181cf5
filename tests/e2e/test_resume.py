"""Killed runs go on where the newest good checkpoint left them, on any number of processes."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import REPOSITORY, command, environment, launch, losses

STEPS = 12
ULYSSES_2 = ("--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "2")


def arguments(config: Path, folder: Path, *extra: str) -> list[str]:
    return ["train", "--config", str(config), "--output_dir", str(folder), "--training.steps", str(STEPS), *extra]


@pytest.fixture(scope="module")
def uninterrupted(encoded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "uninterrupted"
    launch(1, *arguments(encoded, folder))
    return folder


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the run ended before {what}: {process.communicate()[1][-3000:]}"
        assert time.monotonic() < deadline, f"no {what} within two minutes"
        time.sleep(0.005)


def start(processes: int, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(processes, *args),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=REPOSITORY,
        start_new_session=True,
    )


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if "ttv_train" in child.cmdline()]


def steps_done(folder: Path) -> int:
    return len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("moment", ["in a step", "in a checkpoint"])
def test_a_killed_rank_costs_at_most_the_steps_since_the_checkpoint(uninterrupted, encoded, run_folder, moment):
    process = start(2, *arguments(encoded, run_folder, *ULYSSES_2))
    checkpoints = run_folder / "checkpoints"
    if moment == "in a step":
        wait_for(lambda: (checkpoints / "step-00000004").exists() and steps_done(run_folder) >= 5, process, "step 5")
    else:
        wait_for(lambda: (checkpoints / "step-00000002").exists(), process, "the first checkpoint")
        wait_for(lambda: any(checkpoints.glob(".tmp-*")), process, "a checkpoint being written")
    workers(process)[-1].send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) != 0

    resumed = launch(2, *arguments(encoded, run_folder, *ULYSSES_2))
    assert "resuming from" in resumed.stderr
    assert losses(run_folder)[STEPS] == pytest.approx(losses(uninterrupted)[STEPS], rel=1e-6)
    assert list(losses(run_folder)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("processes", [1, 3])
def test_resuming_on_another_number_of_processes(uninterrupted, encoded, run_folder, processes):
    """Six steps on two processes, the rest on another number: the same end."""
    shutil.copytree(
        uninterrupted, run_folder, ignore=shutil.ignore_patterns("step-00000008", "step-00000010", "step-00000012")
    )
    batch = ["--training.global_batch_size", "4"]
    sequence = ["--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "3"] if processes == 3 else []
    shutil.rmtree(run_folder)
    launch(2, *arguments(encoded, run_folder, *ULYSSES_2), "--training.steps", "6")
    launch(processes, *arguments(encoded, run_folder, *batch, *sequence))
    assert losses(run_folder)[STEPS] == pytest.approx(losses(uninterrupted)[STEPS], rel=1e-6)


def test_a_flipped_bit_is_refused_by_name_and_the_checkpoint_before_is_used(uninterrupted, encoded, run_folder):
    shutil.copytree(uninterrupted, run_folder)
    newest = sorted((run_folder / "checkpoints").iterdir())[-1]
    victim = max((path for path in newest.rglob("*.safetensors")), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-7] ^= 0x10
    victim.write_bytes(data)

    resumed = launch(1, *arguments(encoded, run_folder))
    assert newest.name in resumed.stderr
    assert victim.name in resumed.stderr
    assert "resuming from" in resumed.stderr
    assert losses(run_folder)[STEPS] == pytest.approx(losses(uninterrupted)[STEPS], rel=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_and_exits(encoded, run_folder, processes):
    sequence = ULYSSES_2 if processes == 2 else ()
    args = arguments(encoded, run_folder, *sequence, "--checkpoint.every_steps", "1000", "--training.steps", "100000")
    process = start(processes, *args)
    wait_for(lambda: steps_done(run_folder) >= 2, process, "step 2")
    os.kill(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    saved = list((run_folder / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    assert int(saved[0].name.removeprefix("step-")) == max(losses(run_folder))
    assert not [child for child in psutil.process_iter() if str(run_folder) in " ".join(child.cmdline())]
