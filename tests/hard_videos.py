"""Small videos of the kinds that decoders are known to get wrong, and what ffmpeg shows of them."""

import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np

from tests.video_files import damage_frame, write_video

OPEN_GROUPS = {"x264-params": "open-gop=1:keyint=6:min-keyint=6:bframes=2:b-adapt=0:scenecut=0"}
OPEN_GROUPS_HEVC = {"x265-params": "log-level=error:open-gop=1:keyint=6:min-keyint=6:bframes=2:scenecut=0"}
HEVC = {"x265-params": "log-level=error:open-gop=0:keyint=8:bframes=2"}
VARIABLE = [Fraction(number**2, 100) for number in range(24)]
MPEG = {
    "codec": "mpeg2video",
    "options": {"bf": "2", "g": "6"},
    "fps": 25,
    "time_base": Fraction(1, 25),
    "size": (64, 96),
}

SIZE = (128, 192)

HARD_VIDEOS = {
    "constant.mp4": {"options": {"g": "8"}},
    "variable.mp4": {"times": VARIABLE, "options": {"g": "6"}},
    "b_frames.mp4": {"options": {"bf": "3", "g": "9"}},
    "b_frames.avi": {"codec": "mpeg4", "options": {"bf": "2", "g": "6"}, "fps": 25},
    "b_frames.mkv": {"options": {"bf": "3", "g": "9"}, "fps": 30},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "6"}, "time_base": Fraction(1, 1000)},
    "av1.mp4": {"codec": "libsvtav1", "options": {"svtav1-params": "keyint=6"}},
    "program.mpg": MPEG,
    "transport.ts": MPEG,
    "edit_list.mp4": {"hidden_frames": 7, "options": {"g": "100", "sc_threshold": "0"}},
    "open_groups.mp4": {"options": OPEN_GROUPS},
    "open_groups_hevc.mp4": {"codec": "libx265", "options": OPEN_GROUPS_HEVC},
    "ten_bit.mp4": {"codec": "libx265", "options": HEVC, "pix_fmt": "yuv420p10le"},
    "ten_bit_h264.mp4": {"options": {"g": "8"}, "pix_fmt": "yuv420p10le"},
    "odd_size.mp4": {"size": (67, 99), "pix_fmt": "yuv444p", "options": {"g": "8"}},
    "rotated_90.mp4": {"rotation": 90, "options": {"g": "8"}},
    "rotated_180.mp4": {"rotation": 180, "options": {"g": "8"}},
    "wide_pixels.mp4": {"sample_aspect_ratio": Fraction(4, 3), "options": {"g": "8"}},
    "one_group.mp4": {"options": {"g": "1000", "sc_threshold": "0"}},
    "one_frame.mp4": {"num_frames": 1},
}


def write_hard_video(folder: Path, name: str) -> Path:
    """Writes one of `HARD_VIDEOS`."""
    return write_video(folder / name, **({"size": SIZE} | HARD_VIDEOS[name]))


def write_truncated(folder: Path) -> Path:
    """A file whose index is whole and whose last part is gone."""
    path = write_video(folder / "truncated.mp4", 100, size=SIZE, container_options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    return path


def write_damaged(folder: Path) -> Path:
    """A file of 48 frames, of which the key frame 24 is overwritten."""
    path = write_video(folder / "damaged.mp4", 48, size=SIZE, options={"g": "12", "sc_threshold": "0"})
    damage_frame(path, 24)
    return path


def ffmpeg_frames(path: Path, height: int, width: int) -> np.ndarray:
    """Every frame that the ffmpeg command line shows of a file: uint8 (T, height, width, 3), upright, RGB."""
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-map", "0:v:0", "-fps_mode", "passthrough"]
    scaling = f"scale={width}:{height}:flags=bicubic+accurate_rnd+full_chroma_int+bitexact"
    command += ["-vf", scaling, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype=np.uint8).reshape(-1, height, width, 3)
