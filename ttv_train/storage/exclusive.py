"""How a complete file takes a name that nobody has: by the first of these that its file system knows.

A hard link; a rename that replaces nothing (`renameat2` of Linux: Alluxio's mounts, which have no hard links, know it);
or a new file, written in place.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

AT_FDCWD = -100
RENAME_NOREPLACE = 1
UNSUPPORTED = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL)
"""What file systems answer to an operation that they do not know."""


def take_name(partial: Path, path: Path) -> None:
    """Gives the complete file `partial` the name `path`; a link leaves `partial` there too.

    Raises:
        FileExistsError: the name is taken.
        OSError: the file system refuses. Written in place, a file may stay cut off when its writer is killed.
    """
    ways: tuple[Callable[[Path, Path], None], ...] = (os.link, _rename_without_replacing, _create)
    for way in ways[:-1]:
        try:
            return way(partial, path)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    return ways[-1](partial, path)


def _rename_without_replacing(partial: Path, path: Path) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, "no renameat2")
    if function(AT_FDCWD, os.fsencode(partial), AT_FDCWD, os.fsencode(path), RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def _create(partial: Path, path: Path) -> None:
    data = partial.read_bytes()
    file = path.open("xb")
    try:
        with file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
