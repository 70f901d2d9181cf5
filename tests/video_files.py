"""Small videos made for a test. Each frame shows its number in bars that survive a lossy codec."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from ttv_train.data.formats import VideoSource

REPOSITORY = Path(__file__).parents[1]
SAMPLE = REPOSITORY / "data/sample"
CORNER = 16
NUM_BARS = 8
DARK, BRIGHT = 60, 200


def source_of(path: Path) -> VideoSource:
    """A video that is a file of its own."""
    return VideoSource(path, path.name, "caption")


def picture(number: int, height: int = 64, width: int = 96) -> np.ndarray:
    """Frame `number`, RGB uint8 (H, W, 3): dark, its upper left corner white, and in its lower half a bright bar for
    each bit of the number, the lowest at the left."""
    frame = np.full((height, width, 3), DARK, dtype=np.uint8)
    frame[:CORNER, :CORNER] = 255
    for bit in range(NUM_BARS):
        if number >> bit & 1:
            frame[height // 2 :, bit * width // NUM_BARS : (bit + 1) * width // NUM_BARS] = BRIGHT
    return frame


def frame_numbers(video: np.ndarray) -> list[int]:
    """The number that each picture of a video (T, H, W, 3) of the original shape shows."""
    height, width = video.shape[1:3]
    columns = [(2 * bit + 1) * width // (2 * NUM_BARS) for bit in range(NUM_BARS)]
    bars = video[:, height * 3 // 4, columns].mean(axis=-1) > (DARK + BRIGHT) / 2
    return [sum(1 << bit for bit in range(NUM_BARS) if row[bit]) for row in bars]


def write_video(
    path: Path,
    num_frames: int = 24,
    *,
    fps: Fraction | int = 24,
    times: Sequence[Fraction] | None = None,
    codec: str = "libx264",
    size: tuple[int, int] = (64, 96),
    options: dict[str, str] | None = None,
    time_base: Fraction = Fraction(1, 90000),
    pix_fmt: str | None = None,
    sample_aspect_ratio: Fraction | None = None,
    rotation: int = 0,
    hidden_frames: int = 0,
    container_options: dict[str, str] | None = None,
) -> Path:
    """Writes a video whose frames are shown at `times`, in seconds, or at `fps`; the first `hidden_frames` of them are
    before time 0, where an edit list hides them."""
    times = times or [Fraction(k) / Fraction(fps) for k in range(num_frames)]
    start = times[hidden_frames]
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
        stream.codec_context.time_base = Fraction(1) / fps if codec == "mpeg4" else time_base
        if sample_aspect_ratio is not None:
            stream.codec_context.sample_aspect_ratio = sample_aspect_ratio
        if rotation:
            stream.set_display_rotation(rotation)

        def mux(packets: Iterable[av.Packet]) -> None:
            for packet in packets:
                shift = round(start / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                container.mux(packet)

        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            frame.time_base = stream.codec_context.time_base
            frame.pts = round(time / frame.time_base)
            mux(stream.encode(frame))
        mux(stream.encode())
    return path


def damage_frame(path: Path, number: int) -> None:
    """Overwrites most of the packet of frame `number`, which is a key frame, in a file of 24 frames per second."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    (packet,) = (packet for packet in packets if packet.pts * packet.time_base == Fraction(number, 24))
    assert packet.is_keyframe
    data = bytearray(path.read_bytes())
    data[packet.pos + 8 : packet.pos + packet.size] = b"\xff" * (packet.size - 8)
    path.write_bytes(data)
