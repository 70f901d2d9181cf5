"""A flat store of immutable objects, on a local disk or behind a URL.

Only what an object store offers is used: whole objects appear at once or not at all, bytes are read by range, and
nothing is ever listed by a reader.
"""

import contextlib
import os
import re
import secrets
import time
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ttv_train.errors import UserError

OBJECT_NAME = re.compile(r"[A-Za-z0-9._/-]+")
PARTIAL_PREFIX = ".partial-"
PARTIAL_LIFETIME_SECONDS = 3600.0
"""A partial file that nobody has written to for so long belongs to a writer that was killed."""


class Store:
    """Objects under one local folder or fsspec URL such as ``s3://bucket/latents``. Safe to share between threads.

    Object names are relative paths of ``[A-Za-z0-9._/-]``, so that they mean the same on every kind of storage.

    Raises:
        UserError: the URL's protocol is unknown or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"cannot open {url!r}: {error}; give a local folder or a URL that fsspec can open"
            ) from None
        self._is_local = isinstance(self._filesystem, LocalFileSystem)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Up to `length` bytes of the object from `offset`, in one request. Raises OSError if it is absent."""
        end = None if length is None else offset + length
        return bytes(self._filesystem.cat_file(self._path(name), start=offset, end=end))

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole object: after a crash at any moment it is either absent (or what it was) or complete.

        Raises:
            UserError: the storage refuses the write, for instance because it is full.
        """
        path = self._path(name)
        try:
            if self._is_local:
                _put_file(Path(path), data)
            else:
                self._filesystem.pipe_file(path, data)
        except OSError as error:
            raise UserError(
                f"cannot write {name} to {self.url}: {error.strerror or error}; free some space, check the permissions "
                "or choose another place"
            ) from None

    def delete_folder(self, name: str) -> None:
        """Removes every object whose name starts with ``name/``, if there is any."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    def exists(self, name: str) -> bool:
        """Whether the object is there."""
        return bool(self._filesystem.isfile(self._path(name)))

    def size(self, name: str) -> int | None:
        """The object's length in bytes, or None if it is absent."""
        try:
            return int(self._filesystem.size(self._path(name)))
        except FileNotFoundError:
            return None

    def remove_partial_files(self) -> None:
        """Removes what killed writers left half-written in a local folder; object stores do that themselves."""
        if not self._is_local:
            return
        oldest = time.time() - PARTIAL_LIFETIME_SECONDS
        for path in Path(self._root).rglob(f"{PARTIAL_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # its writer is alive and has just renamed it
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def _path(self, name: str) -> str:
        if not OBJECT_NAME.fullmatch(name) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name!r} is not an object name: relative, of [A-Za-z0-9._/-]")
        return f"{self._root}/{name}"


def _put_file(path: Path, data: bytes) -> None:
    """Writes beside `path`, forces the bytes to disk, then renames: a rename is atomic, a write is not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f"{PARTIAL_PREFIX}{path.name}-{secrets.token_hex(8)}"
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
