"""What a store is: flat, immutable objects behind a local folder or a URL.

Only what an object store offers is used: whole objects appear at once or not at all, bytes are read by range, and
nothing is ever listed by a reader.
"""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol

from ttv_train.errors import UserError
from ttv_train.storage.ranges import ByteRange, Content

OBJECT_NAME = re.compile(r"[A-Za-z0-9._/-]+")


class Door(Protocol):
    """One way to reach objects under one folder or URL such as ``s3://bucket/latents``. Safe to share between threads.

    Object names are relative paths of ``[A-Za-z0-9._/-]``, so that they mean the same on every kind of storage.
    Whatever cannot be read raises OSError, FileNotFoundError where the object is absent.
    """

    url: str
    tier: str
    """Under which its bytes are counted, see `counters`."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """Up to `length` bytes of the object from `offset`, in one request; fewer where the object ends."""
        ...

    def size(self, name: str) -> int | None:
        """The object's length in bytes, or None if it is absent."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the object is there."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Writes a whole object: after a crash at any moment it is either absent (or what it was) or complete.

        Raises:
            UserError: the storage refuses the write, for instance because it is full.
        """
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Writes an object unless there is one of that name; False if there is. Of several writers one succeeds, where
        the storage can decide that: local disks, memory and S3 services that know ``If-None-Match``.

        Raises:
            UserError: the storage refuses the write.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes an object, if it is there."""
        ...

    def delete_folder(self, name: str) -> None:
        """Removes every object whose name starts with ``name/``, if there is any."""
        ...

    def remove_partial_files(self) -> None:
        """Removes what killed writers left half-written in a folder; object stores do that themselves."""
        ...

    def warm(self, names: Sequence[str]) -> bool:
        """Has the servers load objects into their cache; False where only reading does that."""
        ...

    def cached_fraction(self, name: str) -> float | None:
        """How much of an object the servers hold in their cache, of 0 to 1; None where they do not say."""
        ...


class Store(Door, Protocol):
    """A door under the layers that verify, retry, cache and fall back. What `open_store` gives."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Door.read`."""
        ...

    def read_many(self, ranges: Sequence[ByteRange]) -> list[Content | OSError]:
        """Ranges of any objects, in the order asked for, each as its bytes or as the error that it ended in. Those
        with a checksum are verified."""
        ...

    def holds(self, digest: str) -> bool:
        """Whether the range with this SHA-256 is in the node's own cache."""
        ...

    def read_range(self, wanted: ByteRange) -> Content:
        """One range. Raises OSError; DamagedReadError if it is not what was written."""
        ...


def check_object_name(name: str) -> str:
    """`name`, if it is one. Raises ValueError for anything else: absolute, with ``..``, or of other characters."""
    if not OBJECT_NAME.fullmatch(name) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is not an object name: relative, of [A-Za-z0-9._/-]")
    return name


def refused_write(url: str, name: str, error: OSError) -> UserError:
    """What a user reads when the storage does not take an object."""
    return UserError(
        f"cannot write {name} to {url}: {error.strerror or error}; free some space, check the permissions "
        "or choose another place"
    )
