"""Where the bytes of a video lie, as a path that the decoder's child process can open."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import BadVideoError
from ttv_train.data.table_files import read_cell

CHUNK_BYTES = 1 << 20


class VideoBytes:
    """Gives the paths of videos. One that lies in a table is copied into memory, until another is asked for."""

    def __init__(self) -> None:
        self._source: VideoSource | None = None
        self._memory: int | None = None

    def path(self, source: VideoSource) -> str:
        """A path of the file that holds a video, as a whole or at its span. BadVideoError if it cannot be read."""
        if source.cell is None:
            return os.fspath(source.path)
        if source != self._source:
            self.close()
            try:
                content = read_cell(source.path, source.cell)
            except OSError as error:
                raise BadVideoError(f"cannot be read: {error.strerror}") from None
            self._memory = os.memfd_create("video")
            with os.fdopen(os.dup(self._memory), "wb") as file:
                file.write(content)
            self._source = source
        return f"/proc/{os.getpid()}/fd/{self._memory}"

    def sha256(self, source: VideoSource) -> str:
        """SHA-256 of a video's bytes, in hex. Raises BadVideoError if they cannot be read."""
        digest = hashlib.sha256()
        try:
            with Path(self.path(source)).open("rb") as file:
                if source.span is None:
                    return hashlib.file_digest(file, "sha256").hexdigest()
                offset, remaining = source.span
                file.seek(offset)
                while remaining and (piece := file.read(min(remaining, CHUNK_BYTES))):
                    digest.update(piece)
                    remaining -= len(piece)
        except OSError as error:
            raise BadVideoError(f"cannot be read: {error.strerror}") from None
        return digest.hexdigest()

    def close(self) -> None:
        """Frees the memory."""
        if self._memory is not None:
            with suppress(OSError):
                os.close(self._memory)
        self._source = self._memory = None
