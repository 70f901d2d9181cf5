"""A tiny run on the sample clips, encoded once per test session, and a way to launch it on any number of processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]

# Three heads and fifteen tokens: neither divides two ranks.
TINY_RUN = {
    "seed": 3,
    "device": {"backend": "cpu"},
    "dataset": {"path": str(REPOSITORY / "data/sample"), "fps": 8, "buckets": ["4x80x48"], "max_clips_per_video": 2},
    "vae": {"kind": "wavelet", "spatial_levels": 3, "temporal_levels": 2, "channels": 8},
    "text_encoder": {"kind": "hash", "hidden_size": 16, "max_length": 8},
    "model": {
        "config": {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "num_layers": 2,
            "time_embed_dim": 32,
            "use_rotary_positional_embeddings": True,
        }
    },
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
    "training": {"steps": 6, "global_batch_size": 4, "micro_batch_size": 2, "precision": "float32"},
    "ema": {"decay": 0.9},
    "checkpoint": {"every_steps": 2, "keep_last": 3},
    "validation": {"every_steps": 3, "holdout": "last_clips", "noise_levels": [0.2, 0.7]},
    "sampling": {"num_steps": 2, "guidance_scale": 2.0},
    "tracking": {"trackers": []},
}


def environment() -> dict[str, str]:
    """One thread per process, no GPU, no launcher variables left over from outside."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def command(num_processes: int, *arguments: str) -> list[str]:
    """`ttv-train ARGUMENTS` as one process, or under torchrun as several."""
    if num_processes == 1:
        return [sys.executable, "-m", "ttv_train", *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [*torchrun, "-m", "ttv_train", *arguments]


def launch(num_processes: int, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; with `check`, fails the test with its output when it exits non-zero."""
    done = subprocess.run(
        command(num_processes, *arguments),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=REPOSITORY,
        timeout=280,
    )
    if check and done.returncode:
        pytest.fail(f"{arguments} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done


def losses(run_folder: Path) -> dict[int, float]:
    """Training loss by step of a run's metrics.jsonl."""
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


@pytest.fixture(scope="session")
def encoded(tmp_path_factory) -> Path:
    """Config file of the tiny run, whose latents are encoded already. Tests override its output_dir."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {**TINY_RUN, "output_dir": str(folder / "run"), "latents": {"path": str(folder / "latents")}}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    launch(1, "encode", "--config", str(path))
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A fresh output_dir, removed when the test passes, because checkpoints add up."""
    folder = tmp_path / "run"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
