"""What every layer over a door is made of."""

from collections.abc import Sequence

from ttv_train.storage.base import Store
from ttv_train.storage.ranges import ByteRange

ReadResult = bytes | OSError


class Layer:
    """Passes everything on to `inner`. A layer overrides `read_many`, through which every read goes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.tier = inner.tier

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        return self.inner.read_many(ranges)

    def read_range(self, wanted: ByteRange) -> bytes:
        """See `Store.read_range`."""
        (result,) = self.read_many([wanted])
        if isinstance(result, OSError):
            raise result
        return result

    def holds(self, digest: str) -> bool:
        """See `Store.holds`."""
        return self.inner.holds(digest)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        return self.read_range(ByteRange(name, offset, length))

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

    def health(self) -> None:
        """See `Store.health`."""
        self.inner.health()
