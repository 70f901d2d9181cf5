"""One run per output folder."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_main_rank

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer."""

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextmanager
def lock_run_folder(output_dir: Path, *, shared: bool = False) -> Iterator[None]:
    """Holds `output_dir`, which is made if it is not there, for this run. On all ranks; rank 0 holds the lock.

    With `shared`, other runs may hold it as well if they share it too, as the workers of an encoding job do.

    It is a lock of the kernel (`flock`), so it ends with rank 0, however that ends; a leftover file locks nothing. The
    file tells who holds it.

    Raises:
        UserError: on every rank, if another run holds the folder or the folder cannot be written.
    """
    descriptors: list[int] = []
    on_main_rank(lambda: descriptors.append(_acquire(output_dir, shared)))
    try:
        yield
    finally:
        for descriptor in descriptors:
            _held.discard(descriptor)
            os.close(descriptor)


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, which is made if it is not there, once no other process does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another output_dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _acquire(output_dir: Path, shared: bool) -> int:
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"output_dir {output_dir} cannot be written: {error.strerror}; choose another one") from None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _describe_holder(descriptor)
        os.close(descriptor)
        raise UserError(
            f"output_dir {output_dir} is in use by {holder}; wait until that run ends, or choose another output_dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(descriptor)
            raise
        logger.warning("the file system of output_dir %s has no locks: do not start a second run in it", output_dir)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    _held.add(descriptor)
    return descriptor


def _describe_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another run"


def _close_in_child() -> None:
    """A forked data loader worker shares its parent's lock and would keep it when it outlives a killed run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
