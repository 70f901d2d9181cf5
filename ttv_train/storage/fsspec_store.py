"""A store behind any URL that fsspec opens: memory://, hf://, oss://, gs://, http://."""

import contextlib
from typing import Any

from ttv_train.storage.base import check_object_name, refused_write


class FsspecStore:
    """Objects under `root` of an fsspec file system. Satisfies `Store`."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._filesystem, self._root = filesystem, root

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        end = None if length is None else offset + length
        return bytes(self._filesystem.cat_file(self._path(name), start=offset, end=end))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        try:
            return int(self._filesystem.size(self._path(name)))
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return bool(self._filesystem.isfile(self._path(name)))

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`."""
        try:
            self._filesystem.pipe_file(self._path(name), data)
        except OSError as error:
            raise refused_write(self.url, name, error) from None

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        try:
            self._filesystem.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            raise refused_write(self.url, name, error) from None
        return True

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    def remove_partial_files(self) -> None:
        """Nothing to remove: an object appears when it is complete."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_object_name(name)}"
