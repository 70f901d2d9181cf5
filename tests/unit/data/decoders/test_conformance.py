"""Every decoder against the ffmpeg command line, frame by frame: right frames, or refused by name."""

import shutil

import av
import numpy as np
import pytest

from tests.hard_videos import HARD_VIDEOS, SIZE, ffmpeg_frames, write_damaged, write_hard_video, write_truncated
from tests.video_files import SAMPLE, frame_numbers, source_of
from ttv_train.config import DatasetConfig
from ttv_train.data.clips import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.decoders import DECODERS, is_installed
from ttv_train.data.formats import VideoSource
from ttv_train.data.frame_index import build_index
from ttv_train.data.probe import BadVideoError, VideoFile, VideoLimits

pytestmark = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg: apt-get install ffmpeg")

REFUSED = {
    "pyav": set(),
    "torchcodec": {"b_frames.avi", "program.mpg", "transport.ts"},
    "decord": {
        *("b_frames.avi", "program.mpg", "transport.ts"),
        *("edit_list.mp4", "open_groups.mp4", "open_groups_hevc.mp4", "ten_bit.mp4"),
    },
}


@pytest.fixture(scope="module", params=[*DECODERS, "auto"])
def decoder(request):
    name = request.param
    if name != "auto" and not is_installed(name):
        pytest.skip(f"needs {DECODERS[name].package}: pip install 'ttv-train[{name}]'")
    with ClipDecoder(DatasetConfig(decoder=name)) as decoder:
        decoder.name = name
        yield decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hard")


def clip_at(path, times, first, count, size):
    """A clip of `count` frames from frame `first` on, of which each is shown at the sample times of the clip."""
    fps = 1 / float(times[first + 1] - times[first]) if count > 1 else 1.0
    return Clip(VideoSource(path, path.name, ""), "", (count, *size), float(times[first]), fps, 0, False)


@pytest.mark.parametrize("name", HARD_VIDEOS)
def test_every_frame_is_the_one_that_ffmpeg_shows(decoder, folder, name):
    path = folder / name
    if not path.exists():
        write_hard_video(folder, name)
    if name in REFUSED.get(decoder.name, ()):
        with pytest.raises(BadVideoError, match=rf"dataset\.decoder {decoder.name}: .*; use auto or pyav"):
            decoder.probe(source_of(path))
        return
    info = decoder.probe(source_of(path))
    with VideoFile(str(path), VideoLimits(10**8, 3600)) as video:
        index = build_index(video)
    times = [(pts - index.pts[0]) * index.info.time_base for pts in index.pts]
    expected = ffmpeg_frames(path, info.height, info.width)
    assert info.num_frames == len(expected) == len(times)
    # From the end to the start, so that every frame is sought; then all in turn, from one open file.
    for number in [*reversed(range(len(times))), *range(len(times))]:
        frame = decoder.decode(clip_at(path, times, number, 1, (info.height, info.width)))[0].numpy()
        errors = [np.abs(frame.astype(int) - other).mean() for other in expected]
        assert errors[number] < 2.5
        assert errors[number] == min(errors)


@pytest.mark.parametrize("name", ["dog.mp4", "towers.mp4"])
def test_real_videos(decoder, name):
    path = SAMPLE / name
    info = decoder.probe(source_of(path))
    expected = ffmpeg_frames(path, info.height, info.width)
    assert info.num_frames == len(expected)
    with VideoFile(str(path), VideoLimits(10**8, 3600)) as video:
        index = build_index(video)
    times = [(pts - index.pts[0]) * index.info.time_base for pts in index.pts]
    for number in (0, 1, len(times) // 2, len(times) - 1, 3):
        frame = decoder.decode(clip_at(path, times, number, 1, (info.height, info.width)))[0].numpy()
        assert np.abs(frame.astype(int) - expected[number]).mean() < 2


def test_truncated_files_are_refused_and_damage_is_no_other_frame(decoder, folder):
    with pytest.raises(BadVideoError, match="truncated"):
        decoder.probe(source_of(write_truncated(folder)))
    path = write_damaged(folder)
    for start in (0, 12, 36):
        clip = Clip(VideoSource(path, path.name, ""), "", (12, *SIZE), start / 24, 24.0, 0, False)
        try:
            numbers = frame_numbers(decoder.decode(clip).numpy())
        except BadVideoError:
            # Some read ahead into the damage that follows frame 23; what matters is that no frame is another.
            assert decoder.name in ("torchcodec", "decord")
        else:
            assert numbers == list(range(start, start + 12))


COLOURS = {
    "smpte170m": ("colormatrix=smpte170m", "yuv420p"),
    "bt709": ("colormatrix=bt709:colorprim=bt709:transfer=bt709", "yuv420p"),
    "full_range": ("colormatrix=bt709:range=pc", "yuvj420p"),
    "bt2020": ("colormatrix=bt2020nc", "yuv420p10le"),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colour_matrix_and_range_are_honoured(decoder, folder, name):
    parameters, pix_fmt = COLOURS[name]
    blocks = np.random.default_rng(1).integers(0, 255, (2, 3, 3), dtype=np.uint8)
    original = np.kron(blocks, np.ones((64, 64, 1), dtype=np.uint8))
    path = folder / f"colours_{name}.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"x264-params": f"log-level=error:qp=8:{parameters}"})
        stream.width, stream.height, stream.pix_fmt = 192, 128, pix_fmt
        container.mux(stream.encode(av.VideoFrame.from_ndarray(original, format="rgb24")))
        container.mux(stream.encode())
    (expected,) = ffmpeg_frames(path, 128, 192)
    frame = decoder.decode(Clip(source_of(path), "", (1, 128, 192), 0.0, 1.0, 0, False))[0].numpy()
    assert np.abs(frame.astype(int) - expected).mean() < 2
    # The encoder was given BT.601 whatever the tag says, so a decoder that follows another tag gives other colours.
    assert (np.abs(frame.astype(int) - original).mean() < 3) == (name in ("smpte170m",))
