"""Scanning a dataset: every video is probed and hashed, and its clips are cut and, if wanted, decoded.

Videos are looked at several at a time and come out in the order of the dataset; only a few are held at once.
"""

import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from ttv_train.config import DatasetConfig
from ttv_train.data.buckets import NoBucketError
from ttv_train.data.cut import Clip, Cutter
from ttv_train.data.decode import ClipDecoder, DecoderFailedError
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import BadVideoError, VideoInfo
from ttv_train.data.shots import Shot, find_shots, require_detector

HELD_PER_WORKER = 4
MOST_WORKERS = 16


@dataclass(frozen=True)
class Stamp:
    """By what a file is taken for unchanged."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class ScannedVideo:
    """What one row of a dataset came to."""

    source: VideoSource
    stamp: Stamp | None
    """None if the file is gone."""
    info: VideoInfo | None
    """None if it is no usable video."""
    sha256: str
    reason: str | None
    """Why it gives no clip."""
    is_final: bool = True
    """Whether another look at the same file would come to the same."""
    shots: list[Shot] | None = None
    """None where they were not looked for."""
    dropped_shots: list[str] = field(default_factory=list)
    """Why shots of a video that gives clips give none."""
    clips: list[Clip] = field(default_factory=list)
    bad_clips: list[tuple[Clip, str]] = field(default_factory=list)
    """Clips that cannot be decoded, with the reason; only looked for when clips are decoded."""


class KnownVideos(Protocol):
    """What an earlier scan found."""

    def find(self, source: VideoSource, stamp: Stamp) -> "ScannedVideo | None":
        """What is known of an unchanged file: `info` and `sha256`, or `reason`; without clips."""
        ...

    def is_decoded(self, source: VideoSource, stamp: Stamp, clip: Clip) -> bool:
        """Whether this clip of an unchanged file was decoded before."""
        ...


def scan(
    sources: Iterable[VideoSource],
    config: DatasetConfig,
    *,
    known: KnownVideos | None = None,
    decode_clips: bool = False,
    num_workers: int | None = None,
) -> Iterator[ScannedVideo]:
    """Looks at videos, `num_workers` at a time.

    Args:
        sources: the videos.
        config: the dataset.
        known: what need not be looked at again.
        decode_clips: decode every clip that is not known to decode.
        num_workers: decoder processes; None takes as many as there are cores, up to 16.

    Raises:
        UserError: videos are to be cut by shot and PySceneDetect is not installed.
    """
    if config.split == "shots":
        require_detector()
    num_workers = num_workers or min(os.cpu_count() or 1, MOST_WORKERS)
    cutter = Cutter.of(config)
    decoders: queue.SimpleQueue[ClipDecoder] = queue.SimpleQueue()
    owned = [ClipDecoder(config) for _ in range(num_workers)]

    def look(source: VideoSource) -> ScannedVideo:
        decoder = decoders.get()
        try:
            return scan_video(source, cutter, decoder, known, decode_clips)
        finally:
            decoders.put(decoder)

    try:
        for decoder in owned:
            decoders.put(decoder)
        with ThreadPoolExecutor(num_workers) as pool:
            pending: deque[Future[ScannedVideo]] = deque()
            for source in sources:
                pending.append(pool.submit(look, source))
                if len(pending) == HELD_PER_WORKER * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        for decoder in owned:
            decoder.close()


def scan_video(
    source: VideoSource, cutter: Cutter, decoder: ClipDecoder, known: KnownVideos | None, decode_clips: bool
) -> ScannedVideo:
    """Looks at one video."""
    try:
        status = source.path.stat()
    except OSError as error:
        return ScannedVideo(source, None, None, "", f"cannot be read: {error.strerror}", is_final=False)
    stamp = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
    found = known.find(source, stamp) if known is not None else None
    if found is not None and found.info is None:
        return found
    try:
        info, sha256 = (found.info, found.sha256) if found is not None else (None, "")
        if info is None:
            info, sha256 = decoder.probe(source), decoder.sha256(source)
        shots = found.shots if found is not None else None
        if cutter.by_shots and shots is None:
            shots = find_shots(decoder, source, info)
    except BadVideoError as error:
        is_final = not isinstance(error, DecoderFailedError)
        return ScannedVideo(source, stamp, None, "", str(error), is_final)
    try:
        clips, dropped = cutter.cut(source, info, sha256, shots if cutter.by_shots else None)
    except NoBucketError as error:
        return ScannedVideo(source, stamp, info, sha256, str(error), shots=shots)
    bad_clips = []
    if decode_clips:
        for clip in clips:
            if known is not None and known.is_decoded(source, stamp, clip):
                continue
            try:
                decoder.decode(clip)
            except BadVideoError as error:
                bad_clips.append((clip, str(error)))
    good = [clip for clip in clips if clip not in [bad for bad, _ in bad_clips]]
    reason = bad_clips[0][1] if bad_clips and not good else None
    return ScannedVideo(
        source=source,
        stamp=stamp,
        info=info,
        sha256=sha256,
        reason=reason,
        shots=shots,
        dropped_shots=dropped,
        clips=good,
        bad_clips=bad_clips,
    )
