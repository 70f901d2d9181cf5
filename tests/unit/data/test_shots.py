"""Videos cut by shot."""

from fractions import Fraction

import av
import numpy as np
import pytest

from tests.video_files import source_of
from ttv_train.config import DatasetConfig
from ttv_train.data.buckets import NoBucketError
from ttv_train.data.clips import list_clips
from ttv_train.data.cut import Cutter
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import VideoInfo
from ttv_train.data.shots import Shot, find_shots
from ttv_train.errors import UserError

INFO = VideoInfo("mov", "h264", 160, 96, 241, Fraction(10), Fraction(1, 12800))


def write_shots(path, lengths, fps=24):
    """A video whose shots, of `lengths` frames, have pictures of different colours and texture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for number, length in enumerate(lengths):
            rng = np.random.default_rng(number)
            picture = np.kron(rng.integers(0, 255, (12, 20, 3), dtype=np.uint8), np.ones((8, 8, 1), dtype=np.uint8))
            for _ in range(length):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_clips_lie_within_shots(tmp_path):
    source = source_of(tmp_path / "a.mp4")
    cutter = Cutter.of(DatasetConfig(fps=8, buckets=["8x96x160", "16x96x160"], max_clips_per_video=9))
    shots = [Shot(0.0, 2.5), Shot(2.625, 3.0), Shot(3.125, 10.0)]
    clips, dropped = cutter.cut(source, INFO, "digest", shots)
    # 21 samples hold one clip of 16, 56 hold three; four samples hold none.
    assert [(clip.bucket[0], clip.start_seconds) for clip in clips] == [
        (16, 0.0),
        (16, 3.125),
        (16, 5.125),
        (16, 7.125),
    ]
    assert [clip.index for clip in clips] == [0, 1, 2, 3]
    assert [clip.is_last for clip in clips] == [False, False, False, True]
    assert dropped == ["shot at 2.6 s: too short: 4 frames at 8 fps, the smallest bucket needs 8"]
    for clip in clips:
        assert any(
            shot.start <= clip.start_seconds and clip.start_seconds + (clip.bucket[0] - 1) / 8 <= shot.end
            for shot in shots
        )


def test_a_video_without_a_long_enough_shot_is_dropped(tmp_path):
    cutter = Cutter.of(DatasetConfig(fps=8, buckets=["16x96x160"]))
    shots = [Shot(0.0, 1.0), Shot(1.125, 2.0)]
    with pytest.raises(NoBucketError, match=r"no shot is used: shot at 0\.0 s: too short: 9 frames"):
        cutter.cut(source_of(tmp_path / "a.mp4"), INFO, "digest", shots)


def test_without_the_detector_the_extra_is_named(tmp_path, monkeypatch):
    write_shots(tmp_path / "a.mp4", [48])
    (tmp_path / "a.txt").write_text("A shot.")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = DatasetConfig(path=str(tmp_path), split="shots", buckets=["8x96x160"])
    with pytest.raises(UserError, match=r"dataset\.split shots: .*ttv-train\[shots\]"):
        list_clips(config, None)


def test_the_detector_finds_the_cuts(tmp_path):
    pytest.importorskip("cv2", reason="needs OpenCV: pip install 'ttv-train[shots]'")
    pytest.importorskip("scenedetect", reason="needs PySceneDetect: pip install 'ttv-train[shots]'")
    path = write_shots(tmp_path / "a.mp4", [30, 60, 48])
    with ClipDecoder(DatasetConfig()) as decoder:
        source = source_of(path)
        shots = find_shots(decoder, source, decoder.probe(source))
    cuts = [Fraction(30, 24), Fraction(90, 24)]
    assert len(shots) == 3
    for cut, before, after in zip(cuts, shots, shots[1:], strict=False):
        assert before.end < cut <= after.start
        assert after.start - before.end == pytest.approx(1 / 8)
    (tmp_path / "a.txt").write_text("Three shots.")
    config = DatasetConfig(path=str(tmp_path), split="shots", buckets=["8x96x160"], max_clips_per_video=9)
    manifest = tmp_path / "manifest.parquet"
    clips, quarantined = list_clips(config, None, manifest=manifest)
    assert [clip.start_seconds for clip in clips] == [0.0, 1.25, 2.25, 3.75, 4.75]
    assert quarantined == []
    assert list_clips(config, None, manifest=manifest)[0] == clips
