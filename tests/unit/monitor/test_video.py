import av
import numpy as np
import pytest
import torch

from ttv_train.monitor import video
from ttv_train.monitor.video import write_video


def moving_gradient(frames: int, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    ramps = [np.stack([x * 3 + 8 * t, y * 4, 255 - x * 3], axis=-1).clip(0, 255) for t in range(frames)]
    return np.stack(ramps).astype(np.uint8)


def read(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), stream


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2))


@pytest.mark.parametrize("codec", video.CODECS)
def test_frames_size_and_colours_survive(tmp_path, monkeypatch, codec):
    monkeypatch.setattr(video, "CODECS", {codec: video.CODECS[codec]})
    frames = moving_gradient(6, 48, 64)
    path = write_video(tmp_path / "a.mp4", torch.from_numpy(frames), fps=12)
    decoded, stream = read(path)
    assert decoded.shape == frames.shape
    assert psnr(decoded, frames) > 30
    assert stream.codec_context.pix_fmt == "yuv420p"
    assert stream.average_rate == 12
    assert list(tmp_path.iterdir()) == [path]


def test_odd_sizes_repeat_the_last_row_and_column(tmp_path):
    frames = moving_gradient(3, 33, 47)
    decoded, _ = read(write_video(tmp_path / "odd.mp4", frames, fps=8))
    assert decoded.shape == (3, 34, 48, 3)
    assert psnr(decoded[:, :33, :47], frames) > 30
    assert np.abs(decoded[:, 33].astype(int) - decoded[:, 32]).mean() < 4


@pytest.mark.parametrize("fps", [7.5, 23.976, 30000 / 1001, 0.5])
def test_fractional_rates_give_the_right_duration(tmp_path, fps):
    _, stream = read(write_video(tmp_path / "rate.mp4", moving_gradient(5, 16, 16), fps))
    assert float(stream.duration * stream.time_base) == pytest.approx(5 / fps, rel=1e-3)


def test_the_index_comes_before_the_data(tmp_path):
    content = write_video(tmp_path / "a.mp4", moving_gradient(2, 16, 16), fps=8).read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", moving_gradient(2, 16, 16), fps=8)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(video.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_video(path, moving_gradient(4, 16, 16), fps=8)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("frames", "fps"),
    [
        (np.zeros((2, 16, 16, 3), np.float32), 8),
        (np.zeros((2, 3, 16, 16), np.uint8), 8),
        (np.zeros((0, 16, 16, 3), np.uint8), 8),
        (np.zeros((2, 16, 16, 3), np.uint8), 0),
    ],
)
def test_wrong_frames_are_refused(tmp_path, frames, fps):
    with pytest.raises(ValueError, match=r"frames must be|fps must be"):
        write_video(tmp_path / "a.mp4", frames, fps)
    assert list(tmp_path.iterdir()) == []
