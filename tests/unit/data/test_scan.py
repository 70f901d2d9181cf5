"""The manifest of a dataset, and that a later scan looks only at what has changed."""

import json
import os
import shutil

import pyarrow.parquet as pq
import pytest

from tests.video_files import SAMPLE, damage_frame, write_video
from ttv_train.config import DatasetConfig
from ttv_train.data.check import check_data
from ttv_train.data.clips import list_clips
from ttv_train.data.dataset_manifest import KnownManifest, write_manifest
from ttv_train.data.decode import ClipDecoder, DecoderFailedError
from ttv_train.errors import UserError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "clips"
    shutil.copytree(SAMPLE, folder)
    (folder / "broken.mp4").write_bytes(b"\0" * 100)
    with (folder / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "broken.mp4", "text": "Nothing."}) + "\n")
    return folder


@pytest.fixture
def looks(monkeypatch):
    """What is asked of decoders: ("probe" | "sha256" | "decode", name)."""
    asked = []

    def recorded(method, original):
        def record(self, what):
            asked.append((method, getattr(what, "source", what).name))
            return original(self, what)

        return record

    for method in ("probe", "sha256", "decode"):
        monkeypatch.setattr(ClipDecoder, method, recorded(method, getattr(ClipDecoder, method)))
    return asked


def config_of(folder, **options):
    return DatasetConfig(path=str(folder), **({"fps": 12, "buckets": ["8x96x160"], "max_clips_per_video": 2} | options))


@pytest.mark.parametrize("place", ["out/dataset.parquet", "clips/dataset.parquet"])
def test_an_unchanged_file_is_not_looked_at_again(folder, tmp_path, looks, place):
    manifest = tmp_path / place
    first = list_clips(config_of(folder), None, manifest=manifest)
    assert {name for _, name in looks} == {path.name for path in folder.glob("*.mp4")}
    looks.clear()
    assert list_clips(config_of(folder), None, manifest=manifest) == first
    assert looks == []
    # Other buckets are cut from what is known.
    others = config_of(folder, fps=8, buckets=["4x64x64"])
    assert list_clips(others, None, manifest=manifest) == list_clips(others, None)
    looks.clear()
    (folder / "dog.mp4").write_bytes((SAMPLE / "towers.mp4").read_bytes())
    shutil.copyfile(SAMPLE / "dog.mp4", folder / "new.mp4")
    (folder / "broken.mp4").unlink()
    clips, quarantined = list_clips(config_of(folder), None, manifest=manifest)
    assert looks == [("probe", "dog.mp4"), ("sha256", "dog.mp4")]
    assert clips == list_clips(config_of(folder), None)[0]
    assert {row.name: row.reason for row in quarantined} == {"new.mp4": "no caption row", "broken.mp4": "no such file"}


def test_a_manifest_of_other_settings_is_not_used(folder, tmp_path, looks):
    manifest = tmp_path / "dataset.parquet"
    list_clips(config_of(folder, max_pixels=100), None, manifest=manifest)
    clips, _ = list_clips(config_of(folder), None, manifest=manifest)
    assert len(clips) == 12


def test_a_verdict_that_may_be_chance_is_not_kept(folder, tmp_path, monkeypatch):
    manifest = tmp_path / "dataset.parquet"

    def time_out(self, source):
        raise DecoderFailedError("decoding took longer than dataset.decode_timeout_seconds 60")

    with monkeypatch.context() as patched:
        patched.setattr(ClipDecoder, "probe", time_out)
        clips, quarantined = list_clips(config_of(folder), None, manifest=manifest)
        assert clips == []
        assert len(quarantined) == 7
    assert len(list_clips(config_of(folder), None, manifest=manifest)[0]) == 12


def test_what_the_manifest_says(tmp_path, capsys):
    path = write_video(tmp_path / "a.mp4", num_frames=48, rotation=90, options={"g": "12", "sc_threshold": "0"})
    damage_frame(path, 24)
    (tmp_path / "a.txt").write_text("Bars.")
    (tmp_path / "b.mp4").write_text("No video.")
    (tmp_path / os.fsdecode(b"caf\xe9.mp4")).touch()
    config = config_of(tmp_path, buckets=["8x96x64"], max_clips_per_video=3)
    manifest = tmp_path / "dataset.parquet"
    assert check_data(config, as_json=True, manifest=manifest) == 0
    rows = pq.read_table(manifest).to_pylist()
    good, *bad = [row for row in rows if row["name"] == "a.mp4"]
    assert (good["reason"], good["bucket"], good["clip_index"], good["is_decoded"]) == (None, "8x96x64", 0, True)
    assert (good["width"], good["height"], good["rotation"], good["num_frames"]) == (64, 96, 90, 48)
    assert (good["codec"], good["caption"], good["duration"]) == ("h264", "Bars.", pytest.approx(47 / 24))
    assert good["size"] == path.stat().st_size
    assert len(good["sha256"]) == 64
    assert len(good["pts_digest"]) == 32
    assert [(row["clip_index"], row["stage"]) for row in bad] == [(1, "decode"), (2, "decode")]
    assert {row["name"]: (row["reason"], row["stage"]) for row in rows if row["name"] != "a.mp4"} == {
        "b.mp4": ("missing caption", "list"),
        "caf\\udce9.mp4": ("missing caption", "list"),
    }
    capsys.readouterr()


def test_clips_that_were_decoded_are_not_decoded_again(folder, tmp_path, looks, capsys):
    manifest = tmp_path / "dataset.parquet"
    check_data(config_of(folder), as_json=True, manifest=manifest)
    before = capsys.readouterr().out
    looks.clear()
    check_data(config_of(folder), as_json=True, manifest=manifest)
    assert looks == []
    assert capsys.readouterr().out == before
    check_data(config_of(folder, max_clips_per_video=1, fps=11), as_json=True, manifest=manifest)
    assert {what for what, _ in looks} == {"decode"}


def test_a_scan_that_is_broken_off_leaves_the_last_manifest(folder, tmp_path):
    manifest = tmp_path / "dataset.parquet"
    config = config_of(folder)
    list_clips(config, None, manifest=manifest)
    content = manifest.read_bytes()
    with pytest.raises(KeyboardInterrupt), write_manifest(manifest, config):
        raise KeyboardInterrupt
    assert manifest.read_bytes() == content
    assert list(tmp_path.glob(".*tmp")) == []


def test_another_file_is_not_taken_for_a_manifest(folder, tmp_path):
    other = tmp_path / "notes.parquet"
    other.write_text("my notes")
    with pytest.raises(UserError, match=r"notes\.parquet is no manifest of a dataset"):
        list_clips(config_of(folder), None, manifest=other)
    assert other.read_text() == "my notes"
    assert KnownManifest.read(tmp_path / "absent.parquet", config_of(folder)) is None
