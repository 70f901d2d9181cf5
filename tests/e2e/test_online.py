"""Training on clips that are encoded as they are needed: as on latents that were encoded before."""

import json
import signal
import subprocess

import pytest

from tests.e2e.conftest import REPOSITORY, command, environment, launch, losses
from tests.e2e.test_resume import start, steps_done, wait_for, workers
from tests.harness import free_port

ONLINE = ("--latents.online", "true", "--latents.path", "absent")
SEQUENCE = ("--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "2")
# Ranks share the rows of each clip.
ROWS = ("--vae.parallel.mode", "space", "--vae.parallel.degree", "2")
# The last rank encodes for the others.
APART = ("--latents.encoder_ranks", "1")
MODES = {
    "alone": (2, ()),
    "dealt": (2, SEQUENCE),
    "together": (2, (*SEQUENCE, *ROWS)),
    "apart": (3, APART),
    "apart and together": (4, ("--latents.encoder_ranks", "2", *SEQUENCE, *ROWS)),
}
"""Processes and options of each way of encoding."""


@pytest.fixture(scope="module")
def stored(encoded, tmp_path_factory):
    """The run on encoded latents."""
    folder = tmp_path_factory.mktemp("stored")
    launch(1, "train", "--config", str(encoded), "--training.steps", "3", "--output_dir", str(folder))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_curve_is_that_of_encoded_latents(mode, stored, encoded, tmp_path):
    processes, options = MODES[mode]
    arguments = ["--config", str(encoded), "--training.steps", "3", *ONLINE, "--output_dir", str(tmp_path)]
    launch(processes, "train", *arguments, *options)
    assert losses(tmp_path) == pytest.approx(losses(stored), rel=1e-6)
    clips = [json.loads((folder / "summary.json").read_text())["clips"] for folder in (stored, tmp_path)]
    assert clips[0] == clips[1]
    if mode == "alone":
        launch(1, "export", *arguments, "--output", str(tmp_path / "model"))
        assert list((tmp_path / "model").rglob("config.json"))


def test_a_run_goes_on_with_another_number_of_encoder_ranks(stored, encoded, tmp_path):
    arguments = ["train", "--config", str(encoded), *ONLINE, "--output_dir", str(tmp_path)]
    launch(3, *arguments, *APART, "--training.steps", "2")
    resumed = launch(3, *arguments, "--latents.encoder_ranks", "2", "--training.steps", "3")
    assert "resuming from" in resumed.stderr
    assert losses(tmp_path) == pytest.approx(losses(stored), rel=1e-6)


@pytest.mark.parametrize("mode", ["together", "apart"])
def test_sigterm_to_all_ranks_ends_the_run_with_a_checkpoint(mode, encoded, tmp_path):
    processes, options = MODES[mode]
    arguments = ["train", "--config", str(encoded), *ONLINE, *options, "--output_dir", str(tmp_path)]
    process = start(processes, *arguments, "--training.steps", "2000", "--checkpoint.every_steps", "10000")
    wait_for(lambda: steps_done(tmp_path) >= 2, process, "step 2")
    for worker in workers(process):
        worker.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "stopped by SIGTERM" in errors
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1


@pytest.mark.parametrize(
    ("victim", "witness", "message"), [(2, 0, "an encoder rank is gone"), (1, 2, "a rank that trains is gone")]
)
def test_a_rank_that_dies_ends_all_ranks(victim, witness, message, encoded, tmp_path):
    """Without a launcher that would end them."""
    arguments = ["train", "--config", str(encoded), *ONLINE, *APART, "--output_dir", str(tmp_path)]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            command(1, *arguments, "--training.steps", "2000"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=REPOSITORY,
        )
        for rank in range(3)
    ]
    try:
        wait_for(lambda: steps_done(tmp_path) >= 2, ranks[0], "step 2")
        ranks[victim].send_signal(signal.SIGKILL)
        errors = {rank: process.communicate(timeout=40)[1] for rank, process in enumerate(ranks) if rank != victim}
    finally:
        for process in ranks:
            process.kill()
    assert all(ranks[rank].returncode not in (0, -signal.SIGKILL) for rank in errors), errors
    assert message in errors[witness]
