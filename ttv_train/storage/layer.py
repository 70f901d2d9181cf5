"""What stands before a door: something that passes on what it does not do itself, and layers of such."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from ttv_train.storage.base import Door
from ttv_train.storage.ranges import ByteRange, Content

ReadResult = Content | OSError
Inner = TypeVar("Inner", bound=Door)


class PassThrough(Generic[Inner]):
    """Passes everything on to `inner`. Satisfies `Door`."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.url = inner.url
        self.tier = inner.tier

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """See `Store.read`."""
        return self.inner.read(name, offset, length)

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self.inner.size(name)

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self.inner.exists(name)

    def put(self, name: str, data: bytes) -> None:
        """See `Store.put`."""
        self.inner.put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return self.inner.put_if_absent(name, data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self.inner.delete(name)

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        self.inner.delete_folder(name)

    def remove_partial_files(self) -> None:
        """See `Store.remove_partial_files`."""
        self.inner.remove_partial_files()

    def warm(self, names: Sequence[str]) -> bool:
        """See `Store.warm`."""
        return self.inner.warm(names)

    def cached_fraction(self, name: str) -> float | None:
        """See `Store.cached_fraction`."""
        return self.inner.cached_fraction(name)


class Layer(PassThrough[Inner], ABC):
    """Every read goes through `read_many`, and nothing is kept. Satisfies `Store`."""

    @abstractmethod
    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""

    def read_range(self, wanted: ByteRange) -> Content:
        """See `Store.read_range`."""
        (result,) = self.read_many([wanted])
        if isinstance(result, OSError):
            raise result
        return result

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        return bytes(self.read_range(ByteRange(name, offset, length)))

    def holds(self, digest: str) -> bool:
        """See `Store.holds`."""
        return False
