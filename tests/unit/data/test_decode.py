import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import Interpolation

from tests.video_files import SAMPLE, damage_frame, frame_numbers, picture, source_of, write_video
from ttv_train.config import DatasetConfig
from ttv_train.data import decoder_process
from ttv_train.data.clips import Clip
from ttv_train.data.decode import ClipDecoder, exact
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import BadVideoError

SIZE = (64, 96)
FLAGS = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
OPEN_GOP = {"x264-params": "open-gop=1:keyint=6:min-keyint=6:bframes=2:b-adapt=0:scenecut=0"}
OPEN_GOP_HEVC = {"x265-params": "log-level=error:open-gop=1:keyint=6:min-keyint=6:bframes=2:scenecut=0"}


@pytest.fixture(scope="module")
def decoder():
    with ClipDecoder(DatasetConfig()) as decoder:
        yield decoder


def make_clip(path, bucket, fps=8.0, start_seconds=0.0):
    return Clip(VideoSource(path, path.name, "caption"), "", bucket, start_seconds, fps, 0, False)


def presented_frames(path):
    """Every frame of a file with its time from the first one, by PyAV's plain loop."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [((frame.pts - frames[0].pts) * frame.time_base, frame) for frame in frames]


def expected_numbers(times, start, fps, count):
    """Number of the last frame not after each sample time."""
    return [max(n for n, time in enumerate(times) if time <= start + Fraction(k, fps)) for k in range(count)]


@pytest.mark.parametrize("fps", [5, 8, 12, 16, 25, 30])
@pytest.mark.parametrize("name", ["dog.mp4", "towers.mp4", "rabbit_wakes.mp4"])
def test_frames_are_those_shown_at_each_time(decoder, name, fps):
    path = SAMPLE / name
    frames = presented_frames(path)
    times = [time for time, _ in frames]
    available = decoder.probe(source_of(path)).num_samples(Fraction(fps))
    assert available == int(times[-1] * fps) + 1
    for first in {0, available // 2, available - 1}:
        count = min(available - first, 6)
        clip = make_clip(path, (count, 180, 320), float(fps), first / fps)
        numbers = expected_numbers(times, Fraction(first, fps), fps, count)
        reference = [frames[n][1].reformat(320, 180, "rgb24", interpolation=FLAGS).to_ndarray() for n in numbers]
        np.testing.assert_array_equal(decoder.decode(clip).numpy(), np.stack(reference))


FILES = {
    "b_frames.mp4": {"options": {"bf": "3", "g": "6"}},
    "open_groups.mp4": {"options": OPEN_GOP},
    "open_groups.mkv": {"options": OPEN_GOP},
    "open_groups_hevc.mp4": {"codec": "libx265", "options": OPEN_GOP_HEVC},
    "one_group.mp4": {"options": {"g": "1000", "sc_threshold": "0"}},
    "rounded_times.mkv": {"fps": 30},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "6"}, "time_base": Fraction(1, 1000)},
    "av1.mp4": {"codec": "libsvtav1", "options": {"svtav1-params": "keyint=6"}},
    "b_frames.avi": {"codec": "mpeg4", "options": {"bf": "2", "g": "6"}, "fps": 25},
    "transport.ts": {"codec": "mpeg2video", "options": {"bf": "2", "g": "6"}, "fps": 25, "time_base": Fraction(1, 25)},
    "program.mpg": {"codec": "mpeg2video", "options": {"bf": "2", "g": "6"}, "fps": 25, "time_base": Fraction(1, 25)},
}


@pytest.mark.parametrize("name", FILES)
def test_every_frame_is_reached_from_a_key_frame(decoder, tmp_path, name):
    path = write_video(tmp_path / name, **FILES[name])
    fps = FILES[name].get("fps", 24)
    assert decoder.probe(source_of(path)).num_samples(Fraction(fps)) == 24
    for start in range(24):
        count = min(24 - start, 4)
        video = decoder.decode(make_clip(path, (count, *SIZE), float(fps), start / fps))
        assert frame_numbers(video.numpy()) == list(range(start, start + count))


@pytest.mark.parametrize(
    "name", ["b_frames.mp4", "open_groups.mp4", "open_groups_hevc.mp4", "b_frames.avi", "vp9.webm"]
)
def test_frames_that_are_passed_over_do_not_change_the_others(decoder, tmp_path, name):
    path = write_video(tmp_path / name, **FILES[name])
    fps = FILES[name].get("fps", 24)
    whole = decoder.decode(make_clip(path, (24, *SIZE), float(fps)))
    for step, first in ((2, 0), (3, 4), (5, 1)):
        count = (23 - first) // step + 1
        # The second clip goes on where the first one ended.
        parts = [
            decoder.decode(make_clip(path, (size, *SIZE), fps / step, (first + step * start) / fps))
            for start, size in ((0, count // 2), (count // 2, count - count // 2))
        ]
        assert torch.cat(parts).equal(whole[first::step])


def test_variable_frame_rate(decoder, tmp_path):
    times = [Fraction(number**2, 100) for number in range(16)]
    path = write_video(tmp_path / "vfr.mp4", times=times, options={"g": "4"})
    info = decoder.probe(source_of(path))
    assert (info.num_frames, info.last_time) == (16, Fraction(225, 100))
    for start in (0, 5, 11):
        video = decoder.decode(make_clip(path, (8, *SIZE), 10.0, start / 10))
        assert frame_numbers(video.numpy()) == expected_numbers(times, Fraction(start, 10), 10, 8)


def test_an_edit_list_hides_frames(decoder, tmp_path):
    path = write_video(tmp_path / "edit.mp4", hidden_frames=7, options={"g": "100", "sc_threshold": "0"})
    info = decoder.probe(source_of(path))
    assert (info.num_frames, info.last_time) == (17, Fraction(16, 24))
    video = decoder.decode(make_clip(path, (17, *SIZE), 24.0))
    assert frame_numbers(video.numpy()) == list(range(7, 24))


def test_times_of_a_fractional_frame_rate_are_exact(decoder, tmp_path):
    path = write_video(tmp_path / "ntsc.mkv", fps=Fraction(30000, 1001), num_frames=40)
    fps = 30000 / 1001
    assert exact(fps) == Fraction(30000, 1001)
    assert exact(29.97) == Fraction(2997, 100)
    for start in (0, 13):
        video = decoder.decode(make_clip(path, (20, *SIZE), fps, start / fps))
        assert frame_numbers(video.numpy()) == list(range(start, start + 20))


@pytest.mark.parametrize(
    ("rotation", "corner"), [(0, (0, 0)), (90, (-1, 0)), (180, (-1, -1)), (270, (0, -1)), (-90, (0, -1))]
)
def test_rotation_is_applied(decoder, tmp_path, rotation, corner):
    path = write_video(tmp_path / "turned.mp4", num_frames=2, rotation=rotation)
    info = decoder.probe(source_of(path))
    size = SIZE if rotation % 180 == 0 else SIZE[::-1]
    assert (info.height, info.width) == size
    frame = decoder.decode(make_clip(path, (1, *size)))[0].numpy()
    expected = np.rot90(picture(0), rotation // 90)
    assert expected[corner].min() == 255
    assert np.abs(frame.astype(int) - expected).mean() < 3
    assert frame[corner].min() > 240


def test_sample_aspect_ratio_is_applied(decoder, tmp_path):
    path = write_video(tmp_path / "wide.mp4", num_frames=2, sample_aspect_ratio=Fraction(2))
    info = decoder.probe(source_of(path))
    assert (info.height, info.width) == (64, 192)
    frame = decoder.decode(make_clip(path, (1, 64, 192)))[0].numpy()
    assert frame[8, :28].min() > 200  # the white corner is 16 pixels high and twice as wide
    assert frame[8, 40:].max() < 200


def test_frames_are_resized_to_cover_and_cropped_at_the_centre(decoder, tmp_path):
    path = write_video(tmp_path / "plain.mp4", num_frames=2)
    frame = decoder.decode(make_clip(path, (1, 32, 32)))[0].numpy()
    assert frame.shape == (32, 32, 3)
    # Half size is 32x48, so the white corner reaches to column 8, where the crop begins.
    assert frame[:, 1:].max() < 100
    # Whole width of a taller target: double size is 128x192, cropped to 128x64 from column 64 on.
    tall = decoder.decode(make_clip(path, (1, 128, 64)))[0].numpy()
    assert tall.shape == (128, 64, 3)
    assert tall.max() < 100


def test_shrinking_does_not_alias(decoder, tmp_path):
    path = tmp_path / "stripes.mkv"
    stripes = np.zeros((64, 96, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv444p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(stripes, format="rgb24")))
        container.mux(stream.encode())
    frame = decoder.decode(make_clip(path, (1, 16, 24)))[0].numpy()
    assert np.abs(frame[:, 1:-1].astype(int) - 127).max() < 16


def test_a_clip_beyond_the_end_is_refused(decoder):
    frames = decoder.probe(source_of(SAMPLE / "dog.mp4")).num_samples(Fraction(8))
    assert len(decoder.decode(make_clip(SAMPLE / "dog.mp4", (frames, 90, 160)))) == frames
    for clip in ((frames + 1, 0.0), (frames, 0.125)):
        with pytest.raises(BadVideoError, match="ends before the clip"):
            decoder.decode(make_clip(SAMPLE / "dog.mp4", (clip[0], 90, 160), start_seconds=clip[1]))


def test_the_right_video_stream_of_a_file_with_sound_first(decoder, tmp_path):
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        audio = container.add_stream("aac", rate=48000)
        video = container.add_stream("libx264", rate=24)
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        for number in range(24):
            sound = av.AudioFrame(format="fltp", layout="mono", samples=1024)
            sound.sample_rate, sound.pts = 48000, number * 1024
            sound.planes[0].update(bytes(4096))
            container.mux(audio.encode(sound))
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        container.mux(audio.encode())
        container.mux(video.encode())
    video = decoder.decode(make_clip(path, (24, *SIZE), 24.0))
    assert frame_numbers(video.numpy()) == list(range(24))


def write_audio(path):
    with av.open(str(path), "w") as container:
        audio = container.add_stream("aac", rate=48000)
        for number in range(10):
            sound = av.AudioFrame(format="fltp", layout="mono", samples=1024)
            sound.sample_rate, sound.pts = 48000, number * 1024
            sound.planes[0].update(bytes(4096))
            container.mux(audio.encode(sound))
        container.mux(audio.encode())


def test_files_that_are_no_video_are_refused_with_the_reason(decoder, tmp_path):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("A film about nothing.\n" * 50)
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    whole = write_video(tmp_path / "no_index.mp4").read_bytes()
    (tmp_path / "no_index.mp4").write_bytes(whole[: len(whole) // 4])  # the index would be at the end
    (tmp_path / "folder.mp4").mkdir()
    write_audio(tmp_path / "audio.mp4")
    reasons = {
        "empty.mp4": "zero bytes",
        "text.mp4": "a text file, not a video",
        "noise.mp4": "not a video, or truncated: |no video stream",
        "no_index.mp4": "not a video, or truncated: ",
        "folder.mp4": "not a regular file",
        "audio.mp4": "no video stream",
        "absent.mp4": "cannot be read: No such file or directory",
    }
    for name, reason in reasons.items():
        with pytest.raises(BadVideoError, match=reason):
            decoder.probe(source_of(tmp_path / name))


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "flv"])
def test_a_truncated_file_is_refused(decoder, tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    options = {"movflags": "faststart"} if suffix == "mp4" else {}
    codec = {"avi": "mpeg4", "flv": "flv1"}.get(suffix, "libx264")
    write_video(path, num_frames=100, codec=codec, fps=25, time_base=Fraction(1, 25), container_options=options)
    assert decoder.probe(source_of(path)).num_frames == 100
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadVideoError, match="truncated"):
        decoder.probe(source_of(path))


def test_playlists_are_never_followed(decoder, tmp_path):
    target = write_video(tmp_path / "target.mp4")
    concat = f"ffconcat version 1.0\nfile {target}\n"
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\n{target}\n#EXT-X-ENDLIST\n"
    for text in (concat, hls):
        for padding in ("", "\0" * 40):  # with a zero byte it does not pass for text
            path = tmp_path / "list.mp4"
            path.write_text(text + padding)
            with pytest.raises(BadVideoError, match=r"text file|not a video"):
                decoder.probe(source_of(path))
    path.write_text(concat + "# \0")
    with pytest.raises(BadVideoError, match="not on whitelist"):
        decoder.probe(source_of(path))


def test_damage_costs_the_clips_that_it_reaches(decoder, tmp_path):
    path = write_video(tmp_path / "damaged.mp4", num_frames=48, options={"g": "12", "sc_threshold": "0"})
    damage_frame(path, 24)
    clips = [make_clip(path, (12, *SIZE), 24.0, start) for start in (0.0, 0.5, 1.0, 1.5)]
    assert frame_numbers(decoder.decode(clips[0]).numpy()) == list(range(12))
    assert frame_numbers(decoder.decode(clips[1]).numpy()) == list(range(12, 24))
    with pytest.raises(BadVideoError, match="damaged"):
        decoder.decode(clips[2])
    assert frame_numbers(decoder.decode(clips[3]).numpy()) == list(range(36, 48))
    # The picture at 26 decodes without an error, from a key frame that does not.
    with pytest.raises(BadVideoError, match="damaged"):
        decoder.decode(make_clip(path, (1, *SIZE), 24.0, 26 / 24))


def test_limits_are_checked_before_anything_is_decoded(tmp_path):
    path = write_video(tmp_path / "plain.mp4", num_frames=24)
    with ClipDecoder(DatasetConfig(max_pixels=64 * 96)) as decoder:
        assert decoder.probe(source_of(path)).num_frames == 24
        with pytest.raises(BadVideoError, match=r"more than dataset\.max_pixels"):
            decoder.decode(make_clip(path, (1, 640, 960)))
    with (
        ClipDecoder(DatasetConfig(max_pixels=64 * 96 - 1)) as decoder,
        pytest.raises(BadVideoError, match=r"96x64 pixels, more than dataset\.max_pixels 6143"),
    ):
        decoder.probe(source_of(path))
    with (
        ClipDecoder(DatasetConfig(max_video_seconds=0.5)) as decoder,
        pytest.raises(BadVideoError, match=r"1 s long, more than dataset.max_video_seconds 0.5"),
    ):
        decoder.probe(source_of(path))


def test_names_of_any_bytes(decoder, tmp_path):
    for name in (b"two words.mp4", b"new\nline.mp4", "emoji 🎬.mp4".encode(), b"latin \xe9.mp4", b"%03d.mp4", b"-.mp4"):
        path = tmp_path / os.fsdecode(name)
        path.write_bytes((SAMPLE / "dog.mp4").read_bytes())
        assert decoder.probe(source_of(path)).num_frames == 41


FAULTS = {
    "crash": "the decoder crashed with SIGSEGV",
    "hang": "longer than dataset.decode_timeout_seconds 1",
    "grow": "decoding needs more than 4 GiB of memory",
    "exit": "the decoder failed with exit code 3",
    "close": "the decoder stopped answering",
    "unsound": "the decoder answered b'F' of 24 bytes instead of b'I'",
}


def test_a_fault_of_the_decoder_costs_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(decoder_process, "WORKER_MODULE", "tests.faulty_decode_worker")
    good = write_video(tmp_path / "good.mp4", num_frames=4)
    with ClipDecoder(DatasetConfig(decode_timeout_seconds=1)) as decoder:
        for fault, reason in FAULTS.items():
            bad = tmp_path / f"{fault}.mp4"
            bad.write_bytes(good.read_bytes())
            with pytest.raises(BadVideoError, match=reason):
                decoder.probe(source_of(bad))
            video = decoder.decode(make_clip(good, (4, *SIZE), 24.0))
            assert frame_numbers(video.numpy()) == [0, 1, 2, 3]


def test_what_a_library_prints_is_not_taken_for_an_answer(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(decoder_process, "WORKER_MODULE", "tests.faulty_decode_worker")
    path = write_video(tmp_path / "print.mp4", num_frames=4)
    with ClipDecoder(DatasetConfig()) as decoder:
        assert decoder.probe(source_of(path)).num_frames == 4
    assert "printed by a library" in capfd.readouterr().err


def test_a_decoder_that_does_not_start_is_no_fault_of_the_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(decoder_process, "WORKER_MODULE", "tests.no_such_module")
    with ClipDecoder(DatasetConfig()) as decoder, pytest.raises(RuntimeError, match=r"does not start.*exit code 1"):
        decoder.probe(source_of(SAMPLE / "dog.mp4"))
    assert "no_such_module" in capfd.readouterr().err


def test_an_interrupted_answer_is_not_read_by_the_next_request(monkeypatch):
    with ClipDecoder(DatasetConfig()) as decoder:
        clip = make_clip(SAMPLE / "dog.mp4", (8, 90, 160))
        expected = decoder.decode(clip)

        def interrupt(process, view):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(decoder_process.DecoderProcess, "receive_frame", interrupt)
            with pytest.raises(KeyboardInterrupt):
                decoder.decode(clip)
        assert decoder.decode(clip).equal(expected)


def test_the_process_is_reused_and_ends_with_its_decoder():
    with ClipDecoder(DatasetConfig()) as decoder:
        pids = set()
        for _ in range(3):
            decoder.probe(source_of(SAMPLE / "dog.mp4"))
            pids.add(decoder._process._process.pid)
        (pid,) = pids
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="needs Linux's /proc")
def test_the_process_is_limited_and_knows_no_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    with ClipDecoder(DatasetConfig()) as decoder:
        decoder.probe(source_of(SAMPLE / "dog.mp4"))
        process = Path(f"/proc/{decoder._process._process.pid}")
        assert b"canary" not in (process / "environ").read_bytes()
        limits = (process / "limits").read_text()
    found = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()}
    assert found["Max address space"] == str(4 << 30)
    assert int(found["Max cpu time"]) <= 63


def test_the_process_imports_no_torch():
    code = "import sys, ttv_train.data.decode_worker; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_process_is_replaced_every_so_many_files(monkeypatch):
    monkeypatch.setattr("ttv_train.data.decode.FILES_PER_PROCESS", 2)
    names = ["dog.mp4", "dog.mp4", "towers.mp4", "dog.mp4", "dog.mp4", "towers.mp4", "skyscraper.mp4"]
    with ClipDecoder(DatasetConfig()) as decoder:
        pids = []
        for name in names:
            decoder.probe(source_of(SAMPLE / name))
            pids.append(decoder._process._process.pid)
    # The first child serves dog and towers, the second dog and towers again, the third the skyscraper.
    assert len(set(pids)) == 3
    assert [pid == pids[0] for pid in pids] == [True] * 3 + [False] * 4
    assert pids[3] == pids[4] == pids[5] != pids[6]
