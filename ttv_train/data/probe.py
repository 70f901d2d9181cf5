"""Opening a video file under limits and a whitelist, and what is known of it before it is decoded.

Runs in the decoder's child process as well: imports PyAV and the standard library only, so that a child starts quickly.
"""

import contextlib
import errno
import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,ogg,flv,asf"
MP4, MATROSKA = "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"
"""What libav calls the containers that have an index of their frames."""
CONTAINERS_THAT_SEEK = (MP4, MATROSKA)
"""After a seek in the others, what was read before it may change the timestamps that follow."""
TEXT_SNIFF_BYTES = 512


class BadVideoError(Exception):
    """A file that cannot give the frames asked of it. The message is the reason, in a few words."""


class SeekError(BadVideoError):
    """The demuxer did not come to a key frame that can be decoded from."""


@dataclass(frozen=True)
class VideoLimits:
    """What a file may ask for before it is refused."""

    max_pixels: int
    """Pixels per frame."""
    max_seconds: float
    """Length of the video."""


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video before it is decoded."""

    container: str
    codec: str
    width: int
    height: int
    """Size as displayed: after the sample aspect ratio and the rotation are applied."""
    num_frames: int
    """Frames that a player shows."""
    last_time: Fraction
    """Presentation time of the last frame in seconds, counted from that of the first."""
    time_base: Fraction
    """Unit of the file's timestamps in seconds."""
    rotation: int = 0
    """Degrees by which a player turns the coded picture, counterclockwise; mirroring is not counted."""
    pts_digest: str = ""
    """SHA-256 of the timestamps of the shown frames, 32 digits of it."""

    @property
    def frame_rate(self) -> float:
        """Average frames per second; 0 for a still picture."""
        return float((self.num_frames - 1) / self.last_time) if self.last_time > 0 else 0.0

    def num_samples(self, fps: Fraction) -> int:
        """How many frames sampled at `fps` the video gives from its first to its last frame."""
        return int((self.last_time + rounding_error(self.time_base)) * fps) + 1


def rounding_error(time_base: Fraction) -> Fraction:
    """By how many seconds a timestamp may be late because it was rounded to the file's time base.

    Matroska stores milliseconds, so the frame of time 1/15 s is stamped 0.067 s. Half a unit undoes that. Units longer
    than a millisecond are frame periods, in which timestamps are exact.
    """
    return time_base / 2 if time_base <= Fraction(1, 1000) else Fraction(0)


@contextlib.contextmanager
def open_video(
    path: str, limits: VideoLimits, span: tuple[int, int] | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a file and its video stream, for decoding on one thread.

    Only whitelisted containers are parsed and only local files are opened, so a playlist that is named like a video
    cannot have other files or addresses read.

    Args:
        path: the file, absolute.
        limits: what it may ask for.
        span: offset and length of the video in the file, in bytes; None if it is the whole file.

    Raises:
        BadVideoError: the file is empty, not a video, in a container that is not allowed, too large or without video.
    """
    head = refuse_at_sight(Path(path), span)
    image = image_format(head)
    url = path if span is None else f"subfile,,start,{span[0]},end,{sum(span)},,:{path}"
    options = {
        "protocol_whitelist": "file" if span is None else "subfile,file",
        "format_whitelist": image or CONTAINERS,
    }
    try:
        container = av.open(url, format=image, options=options, metadata_errors="replace")
    except av.FFmpegError as error:
        raise BadVideoError(f"not a video, or truncated: {libav_message(error)}") from None
    with container:
        stream = container.streams.best("video")
        if not isinstance(stream, VideoStream) or stream.disposition & Disposition.attached_pic:
            raise BadVideoError("no video stream")
        refuse_size(stream.width, stream.height, limits)
        stream.codec_context.options = {
            # The decoder's own limit, for streams whose size grows later, leaves room for padding to whole blocks.
            "max_pixels": str(2 * limits.max_pixels),
            "err_detect": err_detect(stream.codec_context.name),
        }
        stream.codec_context.thread_count = 1
        yield container, stream


class VideoFile:
    """A file that stays open while it is indexed and its clips are decoded. Raises as `open_video`."""

    def __init__(self, path: str, limits: VideoLimits, span: tuple[int, int] | None = None) -> None:
        self.path, self.limits, self.span = path, limits, span
        self._resources = contextlib.ExitStack()
        self.reopen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reopen(self) -> None:
        """Goes back to the start, with nothing left of what was decoded."""
        self._resources.close()
        self.container, self.stream = self._resources.enter_context(open_video(self.path, self.limits, self.span))

    def seek(self, timestamp: int) -> None:
        """Moves before the packet of a timestamp. Raises SeekError if the container cannot."""
        if self.container.format.name not in CONTAINERS_THAT_SEEK:
            self.reopen()
        try:
            self.container.seek(timestamp, stream=self.stream)
        except av.FFmpegError as error:
            raise SeekError(libav_message(error)) from None

    def close(self) -> None:
        """Closes the file."""
        self._resources.close()


def err_detect(codec: str) -> str:
    """libav's damage checks for a codec.

    `explode` has damage refused where many decoders would only conceal it. H.264 marks concealed frames without it, and
    with it refuses sound streams with open groups of pictures after a seek.
    """
    return "crccheck+bitstream+buffer" if codec == "h264" else "crccheck+bitstream+buffer+explode"


def image_format(head: bytes) -> str | None:
    """What libav calls the format of an image that begins with `head`; None if that is no image."""
    for magic, name in ((b"\xff\xd8\xff", "jpeg_pipe"), (b"\x89PNG\r\n\x1a\n", "png_pipe")):
        if head.startswith(magic):
            return name
    return "webp_pipe" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def refuse_at_sight(path: Path, span: tuple[int, int] | None = None) -> bytes:
    """The first bytes of a video. Raises BadVideoError for what can be told from it without parsing it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadVideoError("not a regular file")
        with path.open("rb") as file:
            offset, length = span or (0, TEXT_SNIFF_BYTES)
            file.seek(offset)
            head = file.read(min(length, TEXT_SNIFF_BYTES))
    except OSError as error:
        raise BadVideoError(f"cannot be read: {error.strerror}") from None
    if not head:
        raise BadVideoError("zero bytes")
    if all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in head):
        raise BadVideoError("a text file, not a video")
    return head


def refuse_size(width: int, height: int, limits: VideoLimits) -> None:
    """Raises BadVideoError if a frame of this size may not be allocated."""
    if width * height > limits.max_pixels:
        raise BadVideoError(f"{width}x{height} pixels, more than dataset.max_pixels {limits.max_pixels}")


def keep_libav_messages() -> None:
    """Has PyAV attach libav's last message to the errors it raises, instead of printing it."""
    av.logging.set_level(av.logging.ERROR)
    logging.getLogger("libav").addHandler(logging.NullHandler())
    logging.getLogger("libav").propagate = False


def libav_message(error: av.FFmpegError) -> str:
    """One line: what libav said last, else its name for the error."""
    if error.errno == errno.ENOMEM:
        return "it needs more memory than a decoder may use"
    message = error.log[2] if error.log else error.strerror  # type: ignore[misc]  # PyAV's stub has another shape
    return " ".join(str(message).split())
