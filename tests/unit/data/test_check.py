import json
import os
import re

import pytest

from tests.video_files import SAMPLE, damage_frame, write_video
from ttv_train.config import DatasetConfig, TrainingConfig
from ttv_train.data.check import check_data, printable
from ttv_train.errors import UserError

CONFIG = DatasetConfig(path=str(SAMPLE), fps=12, buckets=["8x96x160"], max_clips_per_video=2)


def make_dataset(folder):
    """One usable video and one file for each reason to be dropped."""
    good = write_video(folder / "good.mp4", num_frames=48, options={"g": "12"}).read_bytes()
    (folder / "truncated.mp4").write_bytes(good[: len(good) // 2])
    (folder / "zero.mp4").touch()
    (folder / "text.mp4").write_text("This is no video.")
    write_video(folder / "one.mp4", num_frames=1)
    for name in ("missing", "empty", "broken", "unlisted"):
        (folder / f"{name}.mp4").write_bytes(good)
    write_video(folder / "sound.mp4", num_frames=2)
    rows = [{"file_name": f"{name}.mp4", "text": name} for name in ("good", "truncated", "zero", "text", "one")]
    rows += [{"file_name": "missing.mp4"}, {"file_name": "empty.mp4", "text": ""}]
    rows += [{"file_name": "../out.mp4", "text": "Outside."}]
    lines = [json.dumps(row).encode() for row in rows] + [b'{"file_name": "broken.mp4", "text": "\xff"}']
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines))


REASONS = {
    "../out.mp4": "path outside the dataset folder",
    "broken.mp4": "the caption is not valid UTF-8",
    "empty.mp4": "empty caption",
    "good.mp4": None,
    "missing.mp4": "missing caption",
    "one.mp4": "too short: 1 frame at 12 fps, the smallest bucket needs 8",
    "sound.mp4": "no caption row",
    "text.mp4": "a text file, not a video",
    "truncated.mp4": "not a video, or truncated: moov atom not found",
    "unlisted.mp4": "no caption row",
    "zero.mp4": "zero bytes",
}


def test_every_file_is_reported_as_json(tmp_path, capsys):
    make_dataset(tmp_path)
    assert check_data(CONFIG.model_copy(update={"path": str(tmp_path)}), as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["reason"] for row in report["files"]} == REASONS
    good = next(row for row in report["files"] if row["reason"] is None)
    assert good == {"name": "good.mp4", "bucket": "8x96x160", "frames": 16, "clips": 2, "reason": None}
    assert (report["clips"], report["dropped"], report["buckets"]) == (2, 10, {"8x96x160": 2})


def test_every_file_is_reported_as_text(tmp_path, capsys):
    make_dataset(tmp_path)
    check_data(CONFIG.model_copy(update={"path": str(tmp_path)}), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "good.mp4       8x96x160, 16 frames in 2 clips"
    assert lines[4] == "missing.mp4    dropped: missing caption"
    assert lines[-2:] == ["bucket 8x96x160: 2 clips", "11 files, 10 dropped, 2 clips"]


def test_a_damaged_clip_is_found_by_decoding(tmp_path, capsys):
    path = write_video(tmp_path / "a.mp4", num_frames=48, options={"g": "12", "sc_threshold": "0"})
    damage_frame(path, 24)
    (tmp_path / "a.txt").write_text("Bars.")
    check_data(CONFIG.model_copy(update={"path": str(tmp_path), "max_clips_per_video": 3}), as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["files"]
    # Clips of 8 frames at 12 fps begin at frames 0, 16 and 32; the groups of pictures at 0, 12, 24 and 36.
    assert (row["clips"], row["frames"]) == (1, 8)
    assert row["reason"] == "clip 1: damaged: a frame is marked corrupt"


def test_a_dataset_that_gives_no_batch_is_an_error(tmp_path, capsys):
    config = CONFIG.model_copy(update={"path": str(tmp_path)})
    with pytest.raises(UserError, match="no captions"):
        check_data(config, as_json=True)
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_text("Nothing.")
    assert check_data(config, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["clips"], report["dropped"], report["buckets"]) == (0, 1, {"8x96x160": 0})
    assert check_data(config, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 files, 1 dropped, 0 clips"


def test_the_sample_is_whole(capsys):
    assert check_data(CONFIG, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 files, 0 dropped, 12 clips"


def test_file_names_cannot_write_to_the_terminal(tmp_path, capsys):
    name = "two\nlines \x1b[31m🎬 " + os.fsdecode(b"\xe9") + ".mp4"
    assert printable(name) == "two\\nlines \\x1b[31m🎬 \\udce9.mp4"
    (tmp_path / name).touch()
    (tmp_path / "metadata.jsonl").write_text("{}\n")
    check_data(CONFIG.model_copy(update={"path": str(tmp_path)}), as_json=False)
    assert "\x1b" not in capsys.readouterr().out


def test_an_empty_bucket_is_an_error(capsys):
    assert check_data(CONFIG.model_copy(update={"buckets": ["8x96x160", "8x160x96"]}), as_json=False) == 1
    assert "bucket 8x160x96: 0 clips; nothing would be trained on in it" in capsys.readouterr().out


def test_the_page_shows_buckets_crops_and_what_is_dropped(tmp_path, capsys):
    make_dataset(tmp_path)
    (tmp_path / "<script>.mp4").touch()
    page = tmp_path / "out/page.html"
    config = CONFIG.model_copy(update={"path": str(tmp_path), "buckets": ["8x96x160", "4x64x64"]})
    training = TrainingConfig(global_batch_size=2)
    assert check_data(config, True, html=page, training=training, batch_sizes={(8, 96, 160): 4}) == 1
    capsys.readouterr()
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;.mp4" in text
    assert text.count("data:image/jpeg;base64,") == 1  # of two clips of one video
    for name, reason in REASONS.items():
        assert reason is None or name == "one.mp4" or f"<tr><td>{name}<td>{reason}</tr>" in text
    rows = re.findall(r"<tr><td>(\d+x\d+x\d+)<td[^>]*>(\w+)(.*?)</tr>", text, re.DOTALL)
    assert [(name, clips) for name, clips, _ in rows] == [("4x64x64", "none"), ("8x96x160", "2")]
    # Clips of 96x64 pixels: 160x96 keeps nine tenths of their height.
    numbers = [re.sub(r"\s", "", number) for number in re.findall(r'<td class="number">([^<]*)', rows[1][2])]
    assert numbers == ["4", "1", "2", "0", "10%", "2"]
    assert 'style="left: 0.00%; top: 5.00%; width:\n100.00%; height: 90.00%"' in text
