"""Training from a store that fails in every way: the run ends with the batches of a store that does not."""

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.alluxio_double import PAGE_BYTES, Answer, Fault, Worker, broken_off, dropped, short, stale, status, trickle
from tests.e2e.conftest import command, encoded, environment, launch, losses

__all__ = ["encoded"]  # the fixture

REPOSITORY = Path(__file__).parents[2]
STEPS = 20
CANARY = "canary-3f9a1c7e5b"


def train_arguments(encoded: Path, run: Path, latents: str, *more: str) -> list[str]:
    steps = ("--training.steps", str(STEPS), "--validation.every_steps", "1000", "--checkpoint.every_steps", "1000")
    # Samples are small here; without joining them there is a request for each.
    storage = ("--storage.timeout_seconds", "2", "--storage.coalesce_gap_mib", "0", "--storage.request_mib", "1")
    return [
        *("train", "--config", str(encoded), "--output_dir", str(run), "--latents.path", latents),
        *(*steps, *storage, *more),
    ]


@pytest.fixture(scope="module")
def expected(encoded, tmp_path_factory) -> dict[int, float]:
    """The loss curve of two processes that read a local disk."""
    run = tmp_path_factory.mktemp("local") / "run"
    launch(2, *train_arguments(encoded, run, latents_of(encoded)))
    return losses(run)


def latents_of(encoded: Path) -> str:
    return str(yaml.safe_load(encoded.read_text())["latents"]["path"])


@pytest.fixture
def worker(encoded, tmp_path) -> Iterator[Worker]:
    shutil.copytree(latents_of(encoded), tmp_path / "root/latents")
    running = Worker(tmp_path / "root")
    yield running
    running.stop()


class EachInTurn:
    """Gives every new request the next of the faults, and its repetitions the same one."""

    FAULTS: tuple[Fault, ...] = (status(503, attempts=3), dropped, broken_off, short, stale, trickle, status(500))

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.fault_of: dict[int, Fault] = {}

    def __call__(self, answer: Answer) -> None:
        key = hash(answer.body)
        fault = self.fault_of.setdefault(key, self.FAULTS[len(self.fault_of) % len(self.FAULTS)])
        self.seen[fault.__name__] += 1
        fault(answer)


def test_a_store_that_fails_in_every_way_gives_the_right_batches(worker, encoded, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY)
    worker.fault = EachInTurn()
    run = tmp_path / "run"
    url = f"alluxio+s3://127.0.0.1:{worker.port}/latents"
    done = launch(2, *train_arguments(encoded, run, url))
    assert losses(run) == expected
    storage = json.loads((run / "summary.json").read_text())["storage"]
    assert set(storage["errors"]) >= {"http_503", "http_500", "connection", "short", "corrupt", "timeout"}
    assert storage["retries"] >= sum(storage["errors"].values()) > 0
    assert not (run / "quarantine.jsonl").exists()
    for path in run.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in done.stdout + done.stderr


def test_pages_of_workers_that_come_and_go_give_the_right_batches(worker, encoded, expected, tmp_path):
    """Through `alluxio://`: pages that are not cached, answers that are wrong, and a worker killed and respawned."""
    other = Worker(worker.root)
    worker.fault, other.fault = EachInTurn(), EachInTurn()
    worker.evicted = {(str(path.relative_to(worker.root)), 0) for path in worker.root.rglob("*.tar")}
    url = f"alluxio://127.0.0.1:{worker.port},127.0.0.1:{other.port}"
    under_store = ("--storage.under_stores", json.dumps({url: f"file://{worker.root}"}))
    pages = ("--storage.alluxio_page_bytes", str(PAGE_BYTES))
    run = tmp_path / "run"
    arguments = train_arguments(encoded, run, f"{url}/latents", *under_store, *pages)
    process = subprocess.Popen(command(2, *arguments), cwd=REPOSITORY, env=environment())
    try:
        while not other.requests:
            assert process.poll() is None
            time.sleep(0.01)
        other.stop()
        time.sleep(1)
        revived = Worker(worker.root, port=other.port)
        assert process.wait(120) == 0
        revived.stop()
    finally:
        process.kill()
    assert losses(run) == expected
    storage = json.loads((run / "summary.json").read_text())["storage"]
    assert storage["under_store_bytes"] > 0
    assert storage["page_misses"] > 0
    assert sum(storage["errors"].values()) > 0
    assert not (run / "quarantine.jsonl").exists()


def test_a_store_that_is_down_for_a_minute_is_waited_for(worker, encoded, expected, tmp_path):
    run = tmp_path / "run"
    arguments = train_arguments(encoded, run, f"alluxio+s3://127.0.0.1:{worker.port}/latents")
    process = subprocess.Popen(command(2, *arguments), cwd=REPOSITORY, env=environment())
    while not any("manifest" in request for request in worker.requests):
        assert process.poll() is None
        time.sleep(0.01)
    worker.stop()
    time.sleep(60)
    revived = Worker(worker.root, port=worker.port)
    try:
        assert process.wait(120) == 0
    finally:
        revived.stop()
    assert losses(run) == expected
    assert json.loads((run / "summary.json").read_text())["storage"]["errors"]["connection"] > 0


def test_a_store_that_stays_down_stops_the_run_with_one_line(worker, encoded, tmp_path):
    worker.stop()
    arguments = train_arguments(encoded, tmp_path / "run", f"alluxio+s3://127.0.0.1:{worker.port}/latents")
    done = launch(1, *arguments, "--storage.deadline_seconds", "1", check=False)
    assert done.returncode == 2
    assert "see that the storage is up, then start again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_cache_disk_costs_the_cache_alone(worker, encoded, expected, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted: run as root, in a container with --cap-add SYS_ADMIN")
    try:
        run = tmp_path / "run"
        (disk / "others").write_bytes(bytes(150_000))
        url = f"alluxio+s3://127.0.0.1:{worker.port}/latents"
        done = launch(2, *train_arguments(encoded, run, url, "--storage.cache_dir", str(disk / "cache")))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert losses(run) == expected
    storage = json.loads((run / "summary.json").read_text())["storage"]
    assert storage["errors"]["cache_full"] == done.stderr.count("No space left on device") > 0


def test_a_warm_cache_needs_the_store_for_its_manifest_only(worker, encoded, expected, tmp_path):
    arguments = ("--storage.cache_dir", str(tmp_path / "cache"))
    url = f"alluxio+s3://127.0.0.1:{worker.port}/latents"
    for name in ("first", "second"):
        worker.requests.clear()
        launch(2, *train_arguments(encoded, tmp_path / name, url, *arguments))
        assert losses(tmp_path / name) == expected
    assert not [request for request in worker.requests if "/shards/" in request]
    storage = json.loads((tmp_path / "second/summary.json").read_text())["storage"]
    assert storage["cache_misses"] == 0
    assert storage["hit_rate"] > 0.9
