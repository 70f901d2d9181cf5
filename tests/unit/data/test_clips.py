import hashlib
import shutil
from fractions import Fraction

import pytest

from tests.video_files import SAMPLE, frame_numbers, write_video
from ttv_train.config import DatasetConfig
from ttv_train.data.clips import list_clips
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.errors import UserError


def make_config(path, **changes):
    return DatasetConfig(**{"path": str(path), "fps": 12, "buckets": ["8x64x96"], "max_clips_per_video": 3, **changes})


def test_the_sample_gives_two_clips_per_video():
    clips, quarantined = list_clips(make_config(SAMPLE, buckets=["8x96x160"], max_clips_per_video=2), None)
    assert quarantined == []
    assert [(clip.source.name, clip.index) for clip in clips[:3]] == [
        ("dog.mp4", 0),
        ("dog.mp4", 1),
        ("rabbit_wakes.mp4", 0),
    ]
    assert len(clips) == 12
    assert {clip.bucket for clip in clips} == {(8, 96, 160)}
    assert {clip.is_last for clip in clips[::2]} == {False}
    assert {clip.is_last for clip in clips[1::2]} == {True}
    assert clips[0].source.caption.startswith("A fluffy white dog")
    assert clips[0].source_sha256 == hashlib.sha256((SAMPLE / "dog.mp4").read_bytes()).hexdigest()


@pytest.mark.parametrize("fps", [12.0, 24.0, 7.5])
def test_clips_of_a_video_follow_each_other_without_gap_or_overlap(tmp_path, fps):
    write_video(tmp_path / "a.mp4", num_frames=72)
    (tmp_path / "a.txt").write_text("Bars.")
    config = make_config(tmp_path, fps=fps)
    clips, _ = list_clips(config, None)
    expected = min(1 + int(Fraction(71, 24) * Fraction(fps)), 3 * 8) // 8
    assert [clip.index for clip in clips] == list(range(expected))
    with ClipDecoder(config) as decoder:
        shown = [number for clip in clips for number in frame_numbers(decoder.decode(clip).numpy())]
    assert shown == [int(k * 24 / Fraction(fps)) for k in range(8 * expected)]


def test_the_only_clip_of_a_video_is_not_the_last_of_several(tmp_path):
    write_video(tmp_path / "a.mp4", num_frames=24)
    (tmp_path / "a.txt").write_text("Bars.")
    clips, _ = list_clips(make_config(tmp_path), None)
    assert [(clip.index, clip.is_last) for clip in clips] == [(0, False)]


def test_what_gives_no_clip_is_quarantined_and_the_rest_goes_on(tmp_path):
    for number in range(8):
        write_video(tmp_path / f"{number}.mp4", num_frames=16)
        (tmp_path / f"{number}.txt").write_text(f"Video {number}.")
    (tmp_path / "0.mp4").write_bytes(b"")
    (tmp_path / "2.txt").unlink()
    (tmp_path / "4.mp4").write_text("text")
    write_video(tmp_path / "5.mp4", num_frames=15)
    (tmp_path / "7.mp4").write_bytes((tmp_path / "6.mp4").read_bytes()[:1000])
    clips, quarantined = list_clips(make_config(tmp_path), None)
    assert [clip.source.name for clip in clips] == ["1.mp4", "3.mp4", "5.mp4", "6.mp4"]
    assert quarantined == [
        QuarantineRow("2.mp4", "missing caption", "list"),
        QuarantineRow("0.mp4", "zero bytes", "probe"),
        QuarantineRow("4.mp4", "a text file, not a video", "probe"),
        QuarantineRow("7.mp4", "not a video, or truncated: moov atom not found", "probe"),
    ]


def test_the_list_does_not_depend_on_the_number_of_workers(tmp_path):
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    config = make_config(tmp_path, buckets=["8x96x160", "12x96x160", "17x96x96"])
    results = [list_clips(config, None, num_workers=number) for number in (1, 2, 4)]
    assert results[0] == results[1] == results[2]


def test_a_length_that_the_encoder_does_not_take_is_refused():
    config = make_config(SAMPLE, buckets=["9x96x160", "10x96x160"])
    with pytest.raises(UserError, match=r"dataset\.buckets 10x96x160: .* 10 frames; 9x96x160 would do"):
        list_clips(config, lambda frames: frames % 4 == 1)


def test_the_folder_must_be_named():
    with pytest.raises(UserError, match=r"dataset\.path is not set"):
        list_clips(DatasetConfig(), None)
