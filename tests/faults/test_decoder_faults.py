"""Decoders that crash, hang or grow, in real processes, among good files: each costs its own file and nothing else."""

import json

import pytest

from tests.video_files import write_video
from ttv_train.config import DatasetConfig
from ttv_train.data import decoder_process
from ttv_train.data.check import check_data
from ttv_train.data.clips import list_clips

REASONS = {
    "crash.mp4": "the decoder crashed with SIGSEGV",
    "hang.mp4": "decoding took longer than dataset.decode_timeout_seconds 2",
    "grow.mp4": "decoding needs more than 4 GiB of memory",
    "exit.mp4": "the decoder failed with exit code 3",
    "unsound.mp4": "the decoder answered b'F' of 24 bytes instead of b'I'",
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A dataset of good files and of one for each fault of `tests.faulty_decode_worker`, in turn."""
    monkeypatch.setattr(decoder_process, "WORKER_MODULE", "tests.faulty_decode_worker")
    folder = tmp_path / "clips"
    folder.mkdir()
    good = write_video(folder / "good.mp4", 8).read_bytes()
    names = ["good.mp4"]
    for number, name in enumerate(REASONS):
        names += [name, f"good{number}.mp4"]
    for name in names:
        (folder / name).write_bytes(good)
    rows = [{"file_name": name, "text": name} for name in names]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(folder), fps=24, buckets=["8x64x96"], decode_timeout_seconds=2)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_each_fault_is_one_row(config, num_workers):
    clips, quarantined = list_clips(config, None, num_workers=num_workers)
    assert [clip.source.name for clip in clips] == ["good.mp4", *(f"good{number}.mp4" for number in range(5))]
    assert [(row.name, row.reason, row.stage) for row in quarantined] == [
        (name, reason, "probe") for name, reason in REASONS.items()
    ]


def test_a_file_that_failed_its_decoder_is_looked_at_again(config, tmp_path, monkeypatch, capsys):
    manifest = tmp_path / "manifest.parquet"
    assert check_data(config, as_json=True, manifest=manifest) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == len(REASONS)
    monkeypatch.undo()
    assert check_data(config, as_json=True, manifest=manifest) == 0
    report = json.loads(capsys.readouterr().out)
    # What needs too much memory does so every time; a crash may be chance.
    assert [row["name"] for row in report["files"] if row["reason"]] == ["grow.mp4"]
