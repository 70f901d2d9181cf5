"""A store in a folder: a local disk, NFS, or a mount of an object store such as Alluxio's."""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ttv_train.storage.base import check_object_name, refused_write
from ttv_train.storage.buffers import BufferPool
from ttv_train.storage.exclusive import take_name
from ttv_train.storage.handles import FileHandles
from ttv_train.storage.partial import PARTIAL_PREFIX, partial_file
from ttv_train.storage.ranges import Content

LARGEST_READ = 64 * 2**20
"""Memory is taken before a read, and a wrong length may be any number: a longer one is compared with the file's."""
PARTIAL_LIFETIME_SECONDS = 3600.0
"""A partial file that nobody has written to for so long belongs to a writer that was killed."""

_buffers = BufferPool()


class PosixStore:
    """Objects are files under `folder`. Satisfies `Door`."""

    def __init__(self, url: str, folder: Path, tier: str = "disk") -> None:
        self.url, self.tier = url, tier
        self.folder = folder
        self._handles = FileHandles()

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """See `Store.read`."""
        path = self._path(name)
        if length is None:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read()
        # Parts are read of objects that are named by their content: a handle never shows an old one.
        with self._handles.lend(path) as descriptor:
            content = read_exactly(descriptor, offset, length)
        if len(content) < length:
            self._handles.forget(path)
        return content

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self._path(name).is_file()

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`."""
        path = self._path(name)
        self._handles.forget(path)
        try:
            with partial_file(path) as partial:
                _write_through(partial, data)
                partial.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            raise refused_write(self.url, name, error) from error

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent` and `take_name`."""
        path = self._path(name)
        try:
            with partial_file(path) as partial:
                _write_through(partial, data)
                take_name(partial, path)
            _sync_folder(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise refused_write(self.url, name, error) from error
        return True

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        path = self._path(name)
        self._handles.forget(path)
        path.unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path(name))

    def remove_partial_files(self) -> None:
        """See `Store.remove_partial_files`."""
        oldest = time.time() - PARTIAL_LIFETIME_SECONDS
        for path in self.folder.rglob(f"{PARTIAL_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer is alive and has just renamed it
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def warm(self, names: Sequence[str]) -> bool:
        """See `Store.warm`."""
        return False

    def cached_fraction(self, name: str) -> float | None:
        """See `Store.cached_fraction`."""
        return None

    def _path(self, name: str) -> Path:
        return self.folder / check_object_name(name)


def read_exactly(descriptor: int, offset: int, length: int) -> memoryview:
    """`length` bytes, or fewer where the file ends before, in memory that is the caller's alone."""
    if length > LARGEST_READ:
        length = min(length, max(0, os.fstat(descriptor).st_size - offset))
    content, position = _buffers.take(length), 0
    while position < length:  # the kernel may give less than it is asked for
        count = os.preadv(descriptor, [content[position : position + LARGEST_READ]], offset + position)
        if count == 0:
            break
        position += count
    return content[:position]


def _write_through(path: Path, data: bytes) -> None:
    """Writes a file whose bytes have reached the disk at the end."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
