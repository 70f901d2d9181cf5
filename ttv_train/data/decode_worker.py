"""The decoder's child process: ``python -m ttv_train.data.decode_worker DECODER``.

Reads requests from standard input, one JSON object a line, and answers on standard output in messages of a kind byte, a
length and a payload. Nothing that it sends is executed or unpickled by its parent. It limits its memory, CPU time and
open files before it opens anything.

Imports neither torch (unless the decoder is torchcodec) nor the project's config, so that it starts in a fraction of a
second.
"""

import gc
import json
import math
import os
import resource
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from ttv_train.data.decoders import FrameReader, choose_decoder, import_decoder
from ttv_train.data.frame_index import FrameIndex, build_index
from ttv_train.data.frames import ClipRequest, decode_clip
from ttv_train.data.probe import BadVideoError, VideoFile, VideoLimits, keep_libav_messages

HEADER = struct.Struct("!cI")
READY, NOT_READY, INFO, FRAME, END, BAD_VIDEO = b"R", b"N", b"I", b"F", b"E", b"B"
ADDRESS_SPACE_BYTES = 4 << 30
OPEN_FILES = 64


def main() -> None:
    """Answers requests until standard input ends."""
    limit_resources()
    keep_libav_messages()
    # Whatever a library prints must not end up among the messages.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    decoder = sys.argv[1]
    try:
        if decoder != "auto":
            import_decoder(decoder)
    except Exception as error:
        send(output, NOT_READY, str(error).encode())
        return
    # What is there now stays; only what files leave behind is looked through.
    gc.freeze()
    send(output, READY)
    worker = Worker(decoder)
    for line in sys.stdin.buffer:
        try:
            for kind, payload in worker.answer(json.loads(line)):
                send(output, kind, payload)
        except BadVideoError as error:
            send(output, BAD_VIDEO, str(error).encode())
        except MemoryError:
            send(output, BAD_VIDEO, f"decoding needs more than {ADDRESS_SPACE_BYTES >> 30} GiB of memory".encode())


def limit_resources() -> None:
    """Bounds what a hostile file can take from the machine, for the whole life of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def limit_cpu(seconds: float) -> None:
    """Has the kernel end this process when it uses `seconds` more of CPU time, also if its parent is gone by then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def send(output: BinaryIO, kind: bytes, payload: bytes | memoryview = b"") -> None:
    """Writes one message."""
    output.write(HEADER.pack(kind, len(payload)))
    output.write(payload)
    output.flush()


class Worker:
    """Answers requests; keeps the last file open, since the clips of one video come one after another.

    Args:
        decoder: name of the decoder, or `auto`.
    """

    def __init__(self, decoder: str) -> None:
        self._decoder = decoder
        self._key: tuple | None = None
        self._index: FrameIndex | None = None
        self._video: VideoFile | None = None
        self._reader: FrameReader | None = None

    def answer(self, request: dict[str, Any]) -> Iterator[tuple[bytes, bytes | memoryview]]:
        """The messages that answer a request: INFO, or as many FRAME as the clip has and END."""
        limit_cpu(request["cpu_seconds"])
        limits = VideoLimits(request["max_pixels"], request["max_seconds"])
        index = self._index_of(request["path"], tuple(request["span"]) if request["span"] else None, limits)
        if self._reader is None:
            assert self._video is not None
            self._reader = choose_decoder(self._decoder, index).open(self._video, index)
        if request["clip"] is None:
            info = index.info
            fields = info.__dict__ | {"last_time": str(info.last_time), "time_base": str(info.time_base)}
            yield INFO, json.dumps(fields).encode()
            return
        clip = request["clip"]
        start, fps = Fraction(clip["start"]), Fraction(clip["fps"])
        try:
            for picture in decode_clip(self._reader, ClipRequest(start, fps, *clip["shape"]), index, limits):
                yield FRAME, picture.data.cast("B")
        except (BadVideoError, MemoryError):
            self._reader.close()
            self._reader = None
            raise
        yield END, b""

    def _index_of(self, path: str, span: tuple[int, int] | None, limits: VideoLimits) -> FrameIndex:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise BadVideoError(f"cannot be read: {error.strerror}") from None
        key = (path, span, status.st_ino, status.st_size, status.st_mtime_ns, limits)
        if self._index is None or key != self._key:
            self._close()
            self._index, self._key = None, key
            # PyAV's frames and their side data refer to each other, which keeps whole pictures until a collection.
            gc.collect()
            self._video = VideoFile(path, limits, span)
            self._index = build_index(self._video)
        return self._index

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._video is not None:
            self._video.close()
        self._reader = self._video = None


if __name__ == "__main__":
    main()
