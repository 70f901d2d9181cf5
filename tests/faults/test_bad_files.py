"""One bad file in ten, of every kind: each is left out with its reason, the same ones on any number of ranks."""

import json
import shutil
import struct

import pytest
import yaml

from tests.e2e.conftest import TINY_RUN, launch, losses
from tests.unit.data.test_decode import write_audio
from tests.video_files import damage_frame, write_video

NUM_GOOD = 108
KINDS = {
    "zero.mp4": "zero bytes",
    "text.mp4": "a text file, not a video",
    "noise.mp4": "not a video, or truncated: ",
    "audio.mp4": "no video stream",
    "truncated.mp4": "truncated",
    "no_index.mp4": "not a video, or truncated: ",
    "damaged.mp4": "damaged: ",
    "one_frame.mp4": "too short: 1 frame",
    "slow.mp4": "frame rate 1 is too low",
    "absent.mp4": "no such file",
    "no_caption.mp4": "missing caption",
    "playlist.mp4": "a text file, not a video",
}


def write_bad_files(folder, good):
    """A file of each kind."""
    whole = write_video(folder / "truncated.mp4", 100, container_options={"movflags": "faststart"}).read_bytes()
    (folder / "truncated.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "no_index.mp4").write_bytes(good[: len(good) // 3])
    (folder / "zero.mp4").touch()
    (folder / "text.mp4").write_text("No video.")
    (folder / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    (folder / "playlist.mp4").write_text("#EXTM3U\n/etc/passwd\n")
    write_audio(folder / "audio.mp4")
    damaged = write_video(folder / "damaged.mp4", 24, options={"g": "12", "sc_threshold": "0"})
    damage_frame(damaged, 12)
    write_video(folder / "one_frame.mp4", 1)
    write_video(folder / "slow.mp4", 8, fps=1)
    (folder / "no_caption.mp4").write_bytes(good)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """108 good videos, no two alike, and 12 bad ones."""
    folder = tmp_path_factory.mktemp("bad") / "clips"
    folder.mkdir()
    good = write_video(folder / "good.mp4", 24, options={"g": "12"}).read_bytes()
    (folder / "good.mp4").unlink()
    rows = []
    for number in range(NUM_GOOD):
        # With a box that players ignore, so that they are different videos.
        (folder / f"{number}.mp4").write_bytes(good + struct.pack(">I4sQ", 16, b"free", number))
        rows.append({"file_name": f"{number}.mp4", "text": f"Bars, number {number}."})
    write_bad_files(folder, good)
    rows += [{"file_name": name} if name == "no_caption.mp4" else {"file_name": name, "text": "Bad."} for name in KINDS]
    # Spread among the good ones.
    rows.sort(key=lambda row: hash_of(row["file_name"]))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def hash_of(name):
    return sum(byte * 31**place for place, byte in enumerate(name.encode())) % 10007


def test_bad_files_cost_themselves_on_any_number_of_ranks(dataset, tmp_path):
    encoded, curves = {}, {}
    for ranks in (1, 3):
        run = tmp_path / f"run-{ranks}"
        config = {
            **TINY_RUN,
            "output_dir": str(run),
            # Twenty frames, so that the damage at frame 12 is within the clip.
            "dataset": {"path": str(dataset), "fps": 24, "buckets": ["20x80x48"]},
            "latents": {"path": str(tmp_path / f"latents-{ranks}"), "samples_per_shard": 16},
            "training": {**TINY_RUN["training"], "steps": 2, "global_batch_size": 6, "micro_batch_size": 3},
            "validation": {**TINY_RUN["validation"], "holdout": "videos", "max_clips": 2},
        }
        path = tmp_path / f"{ranks}.yaml"
        path.write_text(yaml.safe_dump(config))
        done = launch(ranks, "encode", "--config", str(path))
        assert f"quarantined {len(KINDS)}" in done.stdout
        rows = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
        encoded[ranks] = sorted((row["name"], row["reason"], row["stage"]) for row in rows)
        launch(ranks, "train", "--config", str(path))
        curves[ranks] = losses(run)
        shutil.rmtree(run / "checkpoints")
    assert encoded[1] == encoded[3]
    assert [name for name, _, _ in encoded[1]] == sorted(KINDS)
    for name, reason, _ in encoded[1]:
        assert KINDS[name] in reason
    assert curves[3] == pytest.approx(curves[1], rel=1e-5)
