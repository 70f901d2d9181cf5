"""What a user does wrong is answered by one line that names the key and the mend, with exit code 2."""

import fcntl
import json

import pytest
import yaml

from tests.e2e.conftest import launch


def refused(*arguments: str, processes: int = 1) -> str:
    """The one line that a command is refused with."""
    done = launch(processes, *arguments, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ttv-train: error: ")]
    return line


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--optimizer.learning_rat", "1e-4"], ["optimizer.learning_rat", "did you mean optimizer.learning_rate"]),
        (["--training.steps", "0"], ["training.steps"]),
        (["--optimizer.betas", "[0.9"], ["optimizer.betas", "YAML"]),
        (
            ["--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "2"],
            ["sequence.degree 2", "1 process"],
        ),
        (["--latents.path", "/nonexistent"], ["latents.path", "ttv-train encode"]),
        (["--dataset.fps", "4"], ["latents.path", "ttv-train encode"]),
        (["--model.config.num_layer", "2"], ["num_layer", "num_layers"]),
        (["--model.path", "/nonexistent", "--model.config", "{}"], ["model.path /nonexistent"]),
        (["--objective.kind", "flow_matching", "--objective.snr_shift_scale", "3"], ["objective.snr_shift_scale"]),
    ],
)
def test_train_refuses(encoded, run_folder, overrides, expected):
    line = refused("train", "--config", str(encoded), "--output_dir", str(run_folder), *overrides)
    assert all(part in line for part in expected), line


def test_a_missing_encoder_is_named(encoded, tmp_path):
    config = yaml.safe_load(encoded.read_text())
    config["vae"] = {"kind": "diffusers", "path": "/nonexistent/vae"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    line = refused("encode", "--config", str(path), "--latents.path", str(tmp_path / "latents"))
    assert "vae.path" in line
    assert "/nonexistent/vae" in line


def test_an_output_folder_in_use_is_named(encoded, run_folder):
    run_folder.mkdir()
    with (run_folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"pid": 4711, "host": "elsewhere"}))
        lock.flush()
        line = refused("train", "--config", str(encoded), "--output_dir", str(run_folder))
    assert "output_dir" in line
    assert "4711" in line


def test_a_batch_that_cannot_be_dealt_is_refused_on_all_ranks(encoded, run_folder):
    done = launch(3, "train", "--config", str(encoded), "--output_dir", str(run_folder), check=False)
    assert done.returncode != 0
    assert "training.global_batch_size 4 cannot be dealt to 3" in done.stderr


def test_steps_that_are_not_finite_are_skipped_by_all_ranks_and_then_stop_the_run(encoded, run_folder):
    done = launch(
        2,
        *("train", "--config", str(encoded), "--output_dir", str(run_folder)),
        *("--optimizer.learning_rate", "1e30", "--training.max_skipped_steps", "2", "--checkpoint.every_steps", "100"),
        check=False,
    )
    assert done.returncode != 0
    assert "not finite in 3 steps in a row" in done.stderr
    assert "optimizer.learning_rate" in done.stderr
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    skipped = [record["skipped"] for record in records if record["kind"] == "train"]
    assert skipped == [False, True, True, True]
    assert [record["loss"] for record in records if record["kind"] == "train"][1:] == [None, None, None]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--model.config.dropout", "0.5"], ["dropout", "set it to 0"]),
        (["--tracking.trackers", "[wandb]"], ["tracking.trackers", "wandb"]),
    ],
)
def test_two_ranks_refuse_together(encoded, run_folder, overrides, expected):
    done = launch(2, "train", "--config", str(encoded), "--output_dir", str(run_folder), *overrides, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("ttv-train: error: ")]
    assert lines
    assert all(part in line for line in lines for part in expected)
