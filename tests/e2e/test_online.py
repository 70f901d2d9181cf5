"""Training on clips that are encoded as they are needed: as on latents that were encoded before."""

import json
import signal

import pytest

from tests.e2e.conftest import launch, losses
from tests.e2e.test_resume import start, steps_done, wait_for, workers

ONLINE = ("--latents.online", "true", "--latents.path", "absent")
# Two ranks train on the same clips and encode each one together.
TOGETHER = (
    *("--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "2"),
    *("--vae.parallel.mode", "space", "--vae.parallel.degree", "2"),
)
MODES = {"alone": (2, ()), "together": (2, TOGETHER)}
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
    online = tmp_path / "online"
    arguments = ["--config", str(encoded), "--training.steps", "3", *ONLINE]
    launch(processes, "train", *arguments, *options, "--output_dir", str(online))
    assert losses(online) == pytest.approx(losses(stored), rel=1e-6)
    clips = [json.loads((folder / "summary.json").read_text())["clips"] for folder in (stored, online)]
    assert clips[0] == clips[1]
    launch(1, "export", *arguments, "--output_dir", str(online), "--output", str(tmp_path / "model"))
    assert list((tmp_path / "model").rglob("config.json"))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "alone"])
def test_sigterm_ends_the_run_with_a_checkpoint_and_it_goes_on(mode, encoded, tmp_path):
    processes, options = MODES[mode]
    arguments = ["train", "--config", str(encoded), *ONLINE, *options, "--output_dir", str(tmp_path)]
    process = start(processes, *arguments, "--training.steps", "200", "--checkpoint.every_steps", "1000")
    wait_for(lambda: steps_done(tmp_path) >= 2, process, "step 2")
    for worker in workers(process):
        worker.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "stopped by SIGTERM" in errors
    done = steps_done(tmp_path)
    launch(processes, *arguments, "--training.steps", str(done + 1))
    assert list(losses(tmp_path)) == list(range(1, done + 2))
