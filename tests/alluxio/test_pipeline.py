"""Encoding and training through a real Alluxio give what they give on a local disk."""

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import command, encoded, environment, launch, losses

__all__ = ["encoded"]  # the fixture

REPOSITORY = Path(__file__).parents[2]
STEPS = 30
TRAIN = ("--training.steps", str(STEPS), "--validation.every_steps", "1000", "--checkpoint.every_steps", "1000")
STORAGE = ("--storage.timeout_seconds", "2", "--storage.read_threads", "4")


def dataset(folder: Path) -> dict[str, bytes]:
    """The objects of an encoded dataset by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


@contextlib.contextmanager
def started(log: Path, num_processes: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, which does not outlive the test."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(num_processes, *arguments), cwd=REPOSITORY, env=environment(), stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def local(encoded, tmp_path_factory) -> tuple[dict[str, bytes], dict[int, float]]:
    """The encoded dataset on a local disk, and the loss curve of two processes that train on it."""
    run = tmp_path_factory.mktemp("local") / "run"
    launch(2, "train", "--config", str(encoded), "--output_dir", str(run), *TRAIN)
    return dataset(Path(yaml.safe_load(encoded.read_text())["latents"]["path"])), losses(run)


def test_encoding_through_alluxio_writes_the_same_bytes(folder, encoded, local, tmp_path):
    arguments = ("--output_dir", str(tmp_path / "run"), "--latents.path", f"{folder.url}/latents")
    launch(1, "encode", "--config", str(encoded), *arguments)
    assert dataset(folder.ufs / "latents") == local[0]


def test_encoding_goes_on_while_the_worker_is_killed_and_comes_back(folder, cluster, respawn, encoded, tmp_path):
    shards = ("--latents.samples_per_shard", "1")  # as many writes as there are clips
    launch(1, "encode", "--config", str(encoded), "--latents.path", str(tmp_path / "latents"), *shards)
    latents = folder.ufs / "latents"
    arguments = ("encode", "--config", str(encoded), "--output_dir", str(tmp_path / "run"), *shards, *STORAGE)
    with started(tmp_path / "log", 1, *arguments, "--latents.path", f"{folder.url}/latents") as job:
        while job.poll() is None and not list(latents.glob("shards/*")):
            time.sleep(0.005)
        cluster.kill("worker")
        assert not (latents / "manifest.json").exists()
        time.sleep(3)
        respawn("worker")
        assert job.wait(200) == 0, (tmp_path / "log").read_text()[-4000:]
    assert dataset(latents) == dataset(tmp_path / "latents")


def test_training_goes_on_while_the_worker_is_killed_and_comes_back(folder, cluster, respawn, encoded, local, tmp_path):
    source = Path(yaml.safe_load(encoded.read_text())["latents"]["path"])
    shutil.copytree(source, folder.ufs / "latents")
    run = tmp_path / "run"
    places = ("--output_dir", str(run), "--latents.path", f"{folder.url}/latents")
    metrics_page = ("--storage.alluxio_metrics", json.dumps([cluster.metrics]))
    arguments = ("train", "--config", str(encoded), *places, *TRAIN, *STORAGE, *metrics_page)
    with started(tmp_path / "log", 2, *arguments) as process:
        # The index has been read, the samples have not: later, the kernel may have them all.
        while process.poll() is None and not (run / "config.resolved.yaml").exists():
            time.sleep(0.005)
        cluster.kill("worker")
        time.sleep(3)
        respawn("worker")
        assert process.wait(200) == 0, (tmp_path / "log").read_text()[-4000:]
    assert losses(run) == local[1]
    storage = json.loads((run / "summary.json").read_text())["storage"]
    assert storage["alluxio_bytes"] > 0
    assert 0 <= storage["hit_rate"] <= 1
    assert storage["retries"] + storage["abandoned"] > 0
    assert storage["wait_seconds"] > 0
    assert "read from alluxio" in (run / "report.html").read_text()
