"""The frames of a video by presentation time, from demuxing its packets; and decoding from a key frame on.

Runs in the decoder's child process.
"""

import bisect
import hashlib
import struct
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import av
from av.buffer import Buffer
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from ttv_train.data.probe import (
    MATROSKA,
    MP4,
    BadVideoError,
    SeekError,
    VideoFile,
    VideoInfo,
    libav_message,
    refuse_size,
    rounding_error,
)

# The other containers have no header that says how long they are.
CONTAINERS_THAT_DECLARE_LENGTH = {MP4, MATROSKA, "avi", "flv", "asf"}
MAX_FRAMES = 1_000_000
# Decoders that pass over single frames at no loss to others. A packet of MPEG-4 may hold two frames of an AVI.
CODECS_THAT_SKIP = {"h264", "hevc"}


@dataclass(frozen=True)
class Orientation:
    """How a decoded picture is turned to stand upright: swap its axes, then reverse its columns and its rows."""

    transposed: bool = False
    reversed_columns: bool = False
    reversed_rows: bool = False

    @property
    def is_mirrored(self) -> bool:
        """Whether it is no rotation."""
        return (self.transposed + self.reversed_columns + self.reversed_rows) % 2 == 1


@dataclass(frozen=True)
class KeyFrame:
    """A frame that decoding can start from."""

    pts: int
    position: int | None
    """Offset in the file."""
    dts: int | None = field(compare=False)
    """Decoding timestamp; after a seek, demuxers may give none or another."""


@dataclass(frozen=True)
class FrameIndex:
    """The frames of a file by presentation time."""

    info: VideoInfo
    pts: array
    """Sorted timestamps of the frames that are shown, in units of `info.time_base`."""
    key_frames: list[KeyFrame]
    """Sorted by `pts`."""
    orientation: Orientation
    sample_aspect_ratio: Fraction
    has_hidden_frames: bool
    """An edit list hides some of the packets."""
    has_open_groups: bool
    """Some key frame is followed by pictures that are shown before it and may refer to frames before it."""

    def shown_at(self, time: Fraction) -> int:
        """Timestamp of the frame shown at `time`, in seconds from the first frame: the last one not after it."""
        limit = self.pts[0] + int((time + rounding_error(self.info.time_base)) / self.info.time_base)
        return self.pts[bisect.bisect_right(self.pts, limit) - 1]

    def key_frames_before(self, pts: int) -> list[KeyFrame]:
        """The key frames not after the frame `pts`."""
        return self.key_frames[: bisect.bisect_right(self.key_frames, pts, key=lambda key_frame: key_frame.pts)]

    def seconds(self, pts: int) -> float:
        """Presentation time of `pts`, from the first frame."""
        return float((pts - self.pts[0]) * self.info.time_base)


def build_index(video: VideoFile) -> FrameIndex:
    """Demuxes every packet of a file that was just opened, and decodes its first frame.

    Raises:
        BadVideoError: the file is truncated, too long or without timestamps, or its first frame is damaged.
    """
    limits, time_base = video.limits, video.stream.time_base
    if time_base is None:
        raise BadVideoError("frames without timestamps")
    packets = demux(video.container, video.stream)
    sample_aspect_ratio = video.stream.sample_aspect_ratio or Fraction(1)
    container_name, codec = video.container.format.name, video.stream.codec_context.name
    first = first_frame(video, packets.key_frames[0])
    assert first.pts is not None
    shown = array("q", sorted(value for value in packets.pts if value >= first.pts))
    last_time = (shown[-1] - shown[0]) * time_base
    if last_time > limits.max_seconds:
        raise BadVideoError(
            f"{float(last_time):.0f} s long, more than dataset.max_video_seconds {limits.max_seconds:g}"
        )
    orientation = read_orientation(first)
    width, height = max(round(first.width * sample_aspect_ratio), 1), first.height
    refuse_size(width, height, limits)
    if orientation.transposed:
        width, height = height, width
    info = VideoInfo(
        container=container_name,
        codec=codec,
        width=width,
        height=height,
        num_frames=len(shown),
        last_time=last_time,
        time_base=time_base,
        rotation=first.rotation % 360,
        pts_digest=hashlib.sha256(shown.tobytes()).hexdigest()[:32],
    )
    return FrameIndex(
        info=info,
        pts=shown,
        key_frames=packets.key_frames,
        orientation=orientation,
        sample_aspect_ratio=sample_aspect_ratio,
        has_hidden_frames=packets.num_hidden > 0 or len(shown) < len(packets.pts),
        has_open_groups=packets.has_open_groups,
    )


@dataclass(frozen=True)
class Packets:
    """What the packets of a stream say without being decoded."""

    pts: array
    """Timestamps in file order, without those that an edit list hides."""
    key_frames: list[KeyFrame]
    """Sorted by timestamp."""
    num_hidden: int
    has_open_groups: bool


def demux(container: InputContainer, stream: VideoStream) -> Packets:
    """Reads every packet of a file. Raises BadVideoError if it is truncated, damaged or without timestamps."""
    pts = array("q")
    key_frames: list[KeyFrame] = []
    num_hidden, has_open_groups = 0, False
    end = Fraction(0)
    try:
        for packet in container.demux():
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            # A packet of no bytes says that the frame before it is shown on.
            if packet.stream_index != stream.index or packet.size == 0:
                continue
            if packet.is_corrupt:
                raise BadVideoError(f"truncated or damaged after {len(pts)} frames")
            if packet.pts is None:
                raise BadVideoError("frames without timestamps")
            if packet.is_keyframe:
                key_frames.append(KeyFrame(packet.pts, packet.pos, packet.dts))
            elif len(key_frames) > 1 and packet.pts < key_frames[-1].pts:
                has_open_groups = True
            if packet.is_discard:
                num_hidden += 1
            else:
                pts.append(packet.pts)
            if len(pts) > MAX_FRAMES:
                raise BadVideoError(f"more than {MAX_FRAMES} frames")
    except av.FFmpegError as error:
        raise BadVideoError(f"damaged: {libav_message(error)}") from None
    if not key_frames:
        raise BadVideoError("no key frame")
    refuse_truncated(container, end)
    key_frames.sort(key=lambda key_frame: key_frame.pts)
    return Packets(pts, key_frames, num_hidden, has_open_groups)


def refuse_truncated(container: InputContainer, end: Fraction) -> None:
    """Raises BadVideoError if the header promises clearly more than the packets, which end at `end` seconds, hold."""
    if container.format.name not in CONTAINERS_THAT_DECLARE_LENGTH or container.duration is None:
        return
    declared = container.duration / av.time_base
    present = float(end) - (container.start_time or 0) / av.time_base
    if declared - present > max(0.5, 0.05 * declared):
        raise BadVideoError(f"truncated: it holds {present:.2f} s of {declared:.2f} s")


def first_frame(video: VideoFile, key_frame: KeyFrame) -> VideoFrame:
    """The first frame that a player shows. Raises BadVideoError if there is none or it is damaged.

    Args:
        video: the file, of which packets may have been read.
        key_frame: its first one.
    """
    try:
        video.seek(key_frame.pts)
        frames = decode_from_key_frame(video.container, video.stream, {key_frame})
        first = next(frames, None)
    except SeekError:
        video.reopen()
        first = next(decode_from_key_frame(video.container, video.stream), None)
    if first is None:
        raise BadVideoError("no frame can be decoded")
    return first


def decode_from_key_frame(
    container: InputContainer,
    stream: VideoStream,
    expected: Collection[KeyFrame] | None = None,
    is_needed: Callable[[int], bool] = lambda pts: True,
) -> Iterator[VideoFrame]:
    """Decodes on from the next key frame, in presentation order.

    Pictures that follow the key frame in the file but are shown before it may refer to frames before it (an open group
    of pictures): they are passed over, whether or not they decode. Frames that are not needed, and to which no other
    frame refers, may be left out.

    Raises:
        SeekError: there is no key frame, or it is none of `expected`. Where a container does not stamp every frame, as
            MPEG program streams, timestamps after a seek may be guesses other than those seen from the start.
        BadVideoError: a packet or frame shown at or after the key frame is damaged, or time goes backwards.
    """
    start: int | None = None
    last_pts: int | None = None
    context = stream.codec_context
    can_skip = context.name in CODECS_THAT_SKIP
    try:
        for packet in container.demux(stream):
            if packet.size == 0 and packet.pts is not None:
                continue
            if start is None:
                if not packet.is_keyframe or packet.pts is None:
                    continue
                if expected is not None and KeyFrame(packet.pts, packet.pos, packet.dts) not in expected:
                    raise SeekError("no key frame where one was")
                start = packet.pts
            if can_skip:
                context.skip_frame = "DEFAULT" if packet.pts is None or is_needed(packet.pts) else "NONREF"
            failure: av.FFmpegError | None = None
            try:
                frames = packet.decode()
            except av.FFmpegError as error:
                if packet.pts is not None and packet.pts < start:
                    continue
                # The decoder still holds frames that are shown before this packet's and do not need it.
                failure = error
                frames = [frame for frame in stream.decode() if is_before(frame, packet)]
            for frame in frames:
                if frame.pts is None:
                    raise BadVideoError("frames without timestamps")
                if frame.pts < start:
                    continue
                if frame.is_corrupt:
                    raise BadVideoError("damaged: a frame is marked corrupt")
                if last_pts is not None and frame.pts < last_pts:
                    raise BadVideoError("timestamps go backwards")
                last_pts = frame.pts
                yield frame
            if failure is not None:
                raise failure
    except av.FFmpegError as error:
        raise BadVideoError(f"damaged: {libav_message(error)}") from None
    if start is None:
        raise SeekError("no key frame")


def is_before(frame: VideoFrame, packet: av.Packet) -> bool:
    """Whether a frame is shown before that of a packet."""
    return frame.pts is not None and packet.pts is not None and frame.pts < packet.pts


def orientation_of_rotation(degrees: int) -> Orientation:
    """How a picture stands upright that is to be turned by `degrees` counterclockwise."""
    turns = degrees // 90 % 4
    return Orientation(transposed=turns % 2 == 1, reversed_columns=turns in (2, 3), reversed_rows=turns in (1, 2))


def read_orientation(frame: VideoFrame) -> Orientation:
    """How the decoded picture stands upright, from the file's display matrix.

    The matrix [[a, b], [c, d]], 16.16 fixed point, maps a pixel (x, y) to (a x + c y, b x + d y).
    """
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:
        # Side data that PyAV has no name for, such as the EXIF of a photo.
        return orientation_of_rotation(frame.rotation)
    if not isinstance(matrix, Buffer):
        return Orientation()
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    if (a or d) and (b or c):
        raise BadVideoError("rotated by an angle that is not a multiple of 90 degrees")
    if b or c:
        return Orientation(transposed=True, reversed_columns=c < 0, reversed_rows=b < 0)
    return Orientation(reversed_columns=a < 0, reversed_rows=d < 0)
