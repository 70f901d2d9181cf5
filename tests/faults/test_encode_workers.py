"""Two workers that know nothing of each other share an encoding job, while they are killed at random times.

TTV_ENCODE_KILLS=20 makes it as many kills as a release is tested with.
"""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore

KILLS = int(os.environ.get("TTV_ENCODE_KILLS", "4"))
CLIPS = [make_clip(number, name="broken.mp4" if number == 4 else None) for number in range(30)]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.test_encode_workers"])


class SlowDecoder(FakeDecoder):
    def decode(self, clip):
        time.sleep(0.1)
        return super().decode(clip)


@pytest.fixture(autouse=True)
def genuine(monkeypatch):
    """`work` also runs in this process; the next tests need what it replaces."""
    monkeypatch.setattr(encode, "ClipDecoder", encode.ClipDecoder)
    monkeypatch.setattr(keyed_clips, "list_clips", keyed_clips.list_clips)


def work(folder: Path) -> None:
    """Body of a worker."""
    encode.ClipDecoder, keyed_clips.list_clips = SlowDecoder, fake_list_clips(CLIPS)
    assert encode.run(make_config(folder, encoding={"lease_seconds": 2, "decode_workers": 1})) is not None


def start(folder: Path):
    process = CONTEXT.Process(target=work, args=(folder,))
    process.start()
    return process


def check(folder: Path, expected: dict[str, bytes]) -> None:
    """Every key is there once, every sample verifies, and nothing differs from an undisturbed job."""
    store = LatentStore.open(str(folder / "latents"))
    assert Counter(entry.key for entry in store.entries).most_common(1)[0][1] == 1
    assert len(store.entries) == len(CLIPS) - 1
    for entry in store.entries:
        store.read(entry)
    assert stored_bytes(make_config(folder)) == expected


def test_workers_killed_at_random_times_leave_what_an_undisturbed_job_leaves(tmp_path):
    choice = random.Random(0)
    work(tmp_path / "undisturbed")
    expected = stored_bytes(make_config(tmp_path / "undisturbed"))
    kills, job = 0, 0
    while kills < KILLS:
        job += 1
        folder = tmp_path / str(job)
        workers = [start(folder), start(folder)]
        while kills < KILLS and not LatentStore.exists(str(folder / "latents")):
            time.sleep(choice.uniform(0.2, 3))
            victims = [choice.choice(workers)] if choice.random() < 0.6 else workers
            alive = [worker for worker in victims if worker.is_alive()]
            for victim in alive:
                victim.kill()
            kills += len(alive)
            for victim in victims:
                victim.join()
            workers = [start(folder) if worker in victims else worker for worker in workers]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        work(folder)  # what was killed after the commit leaves notes to the next job
        check(folder, expected)


def test_two_workers_share_the_clips_and_a_third_does_nothing(tmp_path):
    workers = [start(tmp_path), start(tmp_path)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    before = stored_bytes(make_config(tmp_path))
    keyed_clips.list_clips = fake_list_clips(CLIPS[:4])
    summary = encode.run(make_config(tmp_path))
    assert (summary.encoded, summary.reused) == (0, 4)
    assert {name for name in stored_bytes(make_config(tmp_path)) if name.startswith("shards/")} == {
        name for name in before if name.startswith("shards/")
    }


def test_sigterm_gives_the_units_back(tmp_path):
    worker = start(tmp_path)
    leases = tmp_path / "latents/units"
    while not list(leases.rglob("leases/*.json")):
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(20)
    assert worker.exitcode == 1  # the body asserts a summary; there is none
    left = [path for path in leases.rglob("leases/*.json") if b'"is_released": false' in path.read_bytes()]
    assert not left
    assert not LatentStore.exists(str(tmp_path / "latents"))
    other = start(tmp_path)
    other.join()
    assert other.exitcode == 0
    assert len(LatentStore.open(str(tmp_path / "latents")).entries) == len(CLIPS) - 1
