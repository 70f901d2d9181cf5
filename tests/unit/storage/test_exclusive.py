"""Names that one writer gets, on file systems that know more or less of how to do that."""

import errno
import os
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ttv_train.errors import UserError
from ttv_train.storage import exclusive
from ttv_train.storage.posix import PosixStore
from ttv_train.storage.s3 import AlluxioS3Store


def refuse(code: int):
    def refused(partial, path):
        raise OSError(code, os.strerror(code))

    return refused


@pytest.fixture(params=["link", "rename", "create"])
def store(request, tmp_path, monkeypatch) -> PosixStore:
    """A folder on a file system that knows hard links, only renames that replace nothing, or neither."""
    if request.param != "link":
        monkeypatch.setattr(os, "link", refuse(errno.ENOSYS))
    if request.param == "create":
        monkeypatch.setattr(exclusive, "_rename_without_replacing", refuse(errno.EINVAL))
    return PosixStore(str(tmp_path), tmp_path)


def test_the_first_writer_has_the_name(store):
    assert [store.put_if_absent("lease", b"mine"), store.put_if_absent("lease", b"yours")] == [True, False]
    assert {path.name: path.read_bytes() for path in store.folder.iterdir()} == {"lease": b"mine"}


def test_a_disk_error_is_no_lack_of_support(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EIO))
    (tmp_path / "partial").write_bytes(b"x")
    with pytest.raises(OSError, match="Input/output"):
        exclusive.take_name(tmp_path / "partial", tmp_path / "lease")
    assert not (tmp_path / "lease").exists()


class Interrupted(MemoryFileSystem):
    """Leaves other bytes behind when its first write is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.interruptions = 1

    def pipe_file(self, path, value, mode="overwrite", **options):
        if self.interruptions:
            self.interruptions -= 1
            super().pipe_file(path, b"")
            raise TimeoutError
        super().pipe_file(path, value, mode, **options)


def test_a_claim_that_was_cut_off_by_alluxio_is_written_again():
    def store() -> AlluxioS3Store:
        return AlluxioS3Store("alluxio+s3://host:39999/b", files, root, "http://host:39999", 1.0, signs=True)

    files, root = Interrupted(), uuid.uuid4().hex
    mine, other = store(), store()
    with pytest.raises(UserError):
        mine.put_if_absent("lease", b"mine")
    assert mine.put_if_absent("lease", b"mine")
    assert mine.read("lease") == b"mine"
    assert not other.put_if_absent("lease", b"yours")
    assert not mine.put_if_absent("lease", b"mine")
