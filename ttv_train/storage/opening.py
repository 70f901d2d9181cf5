"""The one door to storage: from a URL to a store."""

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ttv_train.errors import UserError
from ttv_train.storage.base import Store
from ttv_train.storage.fsspec_store import FsspecStore
from ttv_train.storage.posix import PosixStore


def open_store(url: str) -> Store:
    """The store at a local folder or URL.

    Raises:
        UserError: the URL's protocol is unknown or its package is not installed.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot open {url!r}: {error}; give a local folder or a URL that fsspec can open") from None
    if isinstance(filesystem, LocalFileSystem):
        return PosixStore(url, Path(root))
    return FsspecStore(url, filesystem, root)
