"""A store behind any URL that fsspec opens: memory://, hf://, oss://, gs://, http://."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ttv_train.storage.base import check_object_name, refused_write
from ttv_train.storage.failures import as_os_error
from ttv_train.storage.ranges import Content


class FsspecStore:
    """Objects under `root` of an fsspec file system. Satisfies `Door`."""

    def __init__(self, url: str, filesystem: Any, root: str, tier: str = "remote") -> None:
        self.url, self.tier = url, tier
        self._filesystem, self._root = filesystem, root

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """See `Store.read`."""
        end = None if length is None else offset + length
        path = self._path(name)
        with _os_errors():
            return bytes(self._filesystem.cat_file(path, start=offset, end=end))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        path = self._path(name)
        try:
            with _os_errors():
                return int(self._filesystem.size(path))
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self.size(name) is not None

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`."""
        path = self._path(name)
        try:
            with _os_errors():
                self._filesystem.pipe_file(path, data)
        except OSError as error:
            raise refused_write(self.url, name, error) from error

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        path = self._path(name)
        try:
            with _os_errors():
                self._filesystem.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            raise refused_write(self.url, name, error) from error
        return True

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._filesystem.rm_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._filesystem.rm(self._path(name), recursive=True)

    def remove_partial_files(self) -> None:
        """Nothing to remove: an object appears when it is complete."""

    def warm(self, names: Sequence[str]) -> bool:
        """See `Store.warm`."""
        return False

    def cached_fraction(self, name: str) -> float | None:
        """See `Store.cached_fraction`."""
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_object_name(name)}"


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Client libraries raise classes of their own, with what the server said in them."""
    try:
        yield
    except FileExistsError:
        raise
    except Exception as error:
        raise as_os_error(error) from None
