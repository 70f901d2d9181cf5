"""A rank that shares another one's clips is killed: its leader says so and ends, and the same command goes on from
there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from tests.harness import free_port
from ttv_train import encode
from ttv_train.data import keyed_clips

REPOSITORY = Path(__file__).parents[2]
CLIPS = [make_clip(number) for number in range(24)]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class SlowDecoder(FakeDecoder):
    def decode(self, clip):
        time.sleep(0.1)
        return super().decode(clip)


def work(folder: Path) -> None:
    """Body of a rank."""
    rank = os.environ.get("RANK", "0")
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    encode.ClipDecoder, keyed_clips.list_clips = SlowDecoder, fake_list_clips(CLIPS)
    degree = int(os.environ.get("WORLD_SIZE", "1"))
    config = make_config(folder, vae={"parallel": {"mode": "time", "degree": degree}})
    encode.run(config)


def start(folder: Path, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.faults.test_encode_follower", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["torchrun", "without a launcher"])
def test_a_killed_follower_ends_the_job_by_name_and_a_rerun_finishes_it(launcher, tmp_path):
    undisturbed = start(tmp_path / "undisturbed")
    if launcher:
        jobs = [start(tmp_path / "job", launcher)]
    else:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        jobs = [start(tmp_path / "job", RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    units = tmp_path / "job/latents/units"
    while not list(units.rglob("leases/*.json")):
        assert jobs[0].poll() is None, jobs[0].communicate()[1]
        time.sleep(0.01)
    os.kill(int((tmp_path / "job/pid-1").read_text()), signal.SIGKILL)
    _, errors = jobs[0].communicate(timeout=60)
    assert jobs[0].returncode not in (0, -signal.SIGKILL)
    assert "rank 1, which encodes with rank 0, has ended" in errors
    assert not [path for path in units.rglob("leases/*.json") if b'"is_released": false' in path.read_bytes()]
    assert not (tmp_path / "job/latents/manifest.json").exists()
    for process in jobs[1:]:
        process.communicate()

    again = start(tmp_path / "job", TORCHRUN)
    for process in (again, undisturbed):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    found, expected = (stored_bytes(make_config(tmp_path / name)) for name in ("job", "undisturbed"))
    assert {name: found[name] for name in found if name.endswith(".tar")} == {
        name: expected[name] for name in expected if name.endswith(".tar")
    }


if __name__ == "__main__":
    work(Path(sys.argv[1]))
