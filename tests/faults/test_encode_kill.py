"""The encoding job, killed at every place where it touches the disk, and run again."""

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore

REPOSITORY = Path(__file__).parents[2]
CLIPS = [make_clip(number, name="broken.mp4" if number == 4 else None) for number in range(8)]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.test_encode_kill"])


def encode_until(folder: Path, deadly_call: int | None, clips=CLIPS) -> None:
    """Body of a process: runs the job, and kills itself at its `deadly_call`-th call that changes the disk for good."""
    encode.ClipDecoder, keyed_clips.list_clips = FakeDecoder, fake_list_clips(clips)
    calls = itertools.count()

    def deadly(function):
        def wrapper(*args, **kwargs):
            if next(calls) == deadly_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    encode.run(make_config(folder))


def run_job(folder: Path, deadly_call: int | None = None, clips=CLIPS) -> int:
    """Exit code of a job in a process of its own."""
    process = CONTEXT.Process(target=encode_until, args=(folder, deadly_call, clips))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("base", [None, CLIPS[:3]], ids=["first run", "after a committed run"])
def test_killed_at_any_write_and_run_again_gives_the_same_bytes(tmp_path, base):
    def fresh_folder(name: str) -> Path:
        if base is not None:
            assert run_job(tmp_path / name, clips=base) == 0
        return tmp_path / name

    undisturbed = fresh_folder("undisturbed")
    assert run_job(undisturbed) == 0
    expected = stored_bytes(make_config(undisturbed))
    for deadly_call in itertools.count(step=3):
        folder = fresh_folder(str(deadly_call))
        code = run_job(folder, deadly_call)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if LatentStore.exists(str(folder / "latents")):  # what readers see meanwhile is whole
            store = LatentStore.open(str(folder / "latents"))
            assert all(store.read(entry).mean.isfinite().all() for entry in store.entries)
        assert run_job(folder) == 0
        assert stored_bytes(make_config(folder)) == expected
    assert deadly_call > 20


def test_a_job_of_two_ranks_killed_as_a_whole_ends_with_the_bytes_of_one_rank(tmp_path):
    """The real job on the sample clips."""

    def command(name: str, num_processes: int) -> list[str]:
        config = make_config(
            tmp_path / name,
            dataset={"path": str(REPOSITORY / "data/sample"), "buckets": ["4x32x48"], "max_clips_per_video": 2},
            latents={"samples_per_shard": 2},
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        return [sys.executable, *(launcher if num_processes > 1 else []), "-m", "ttv_train", "encode", "--config", path]

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command("one", 1), cwd=REPOSITORY, env=environment, check=True, timeout=120)
    job = subprocess.Popen(command("two", 2), cwd=REPOSITORY, env=environment, start_new_session=True)
    records = tmp_path / "two/latents/units"
    while job.poll() is None and not (records.is_dir() and any(records.iterdir())):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.05))
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    subprocess.run(command("two", 2), cwd=REPOSITORY, env=environment, check=True, timeout=120)
    one, two = (stored_bytes(make_config(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one/run/quarantine.jsonl").exists() == (tmp_path / "two/run/quarantine.jsonl").exists()
