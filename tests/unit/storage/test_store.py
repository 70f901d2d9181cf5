"""What every store does, and what a folder does besides."""

import errno
import multiprocessing
import os
import time
import uuid
from pathlib import Path

import pytest

from ttv_train.errors import UserError
from ttv_train.storage import Store, open_store
from ttv_train.storage.partial import PARTIAL_PREFIX
from ttv_train.storage.posix import PARTIAL_LIFETIME_SECONDS


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def test_reads_ranges_of_what_was_put(store):
    store.put("shards/a.tar", b"0123456789")
    assert store.read("shards/a.tar") == b"0123456789"
    assert store.read("shards/a.tar", 3, 4) == b"3456"
    assert store.read("shards/a.tar", 8, 4) == b"89"
    assert store.read("shards/a.tar", 7) == b"789"
    assert (store.exists("shards/a.tar"), store.size("shards/a.tar")) == (True, 10)


def test_replaces_an_object(store):
    store.put("manifest.json", b"old")
    store.put("manifest.json", b"newer")
    assert store.read("manifest.json") == b"newer"


def test_puts_an_object_only_where_there_is_none(store):
    assert store.put_if_absent("leases/one", b"mine")
    assert not store.put_if_absent("leases/one", b"yours")
    assert store.read("leases/one") == b"mine"


def test_deletes_an_object(store):
    store.put("leases/one", b"")
    store.delete("leases/one")
    store.delete("leases/one")
    assert not store.exists("leases/one")


def test_deletes_a_folder(store):
    for name in ("units/a", "units/b/c", "units-of-others"):
        store.put(name, b"x")
    store.delete_folder("units")
    store.delete_folder("units")
    assert [store.exists(name) for name in ("units/a", "units/b/c", "units-of-others")] == [False, False, True]


def test_an_absent_object_has_no_size_and_cannot_be_read(store):
    assert (store.exists("manifest.json"), store.size("manifest.json")) == (False, None)
    with pytest.raises(FileNotFoundError):
        store.read("manifest.json")


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "/etc/passwd", "a b", "a\\b", "ä", "a\n"])
def test_refuses_other_names(store, name):
    with pytest.raises(ValueError, match="is not an object name"):
        store.put(name, b"")


def test_unknown_protocol_is_a_user_error():
    with pytest.raises(UserError, match="warp://"):
        open_store("warp://bucket/latents")


def test_a_failed_put_leaves_the_old_object_and_nothing_else(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("manifest.json", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        store.put("manifest.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert store.read("manifest.json") == b"old"


def test_removes_partial_files_of_killed_writers_only(tmp_path):
    store = open_store(str(tmp_path))
    store.put("shards/a.tar", b"kept")
    abandoned, live = (tmp_path / "shards" / f"{PARTIAL_PREFIX}{name}" for name in ("abandoned", "live"))
    abandoned.write_bytes(b"")
    live.write_bytes(b"")
    long_ago = time.time() - PARTIAL_LIFETIME_SECONDS - 1
    os.utime(abandoned, (long_ago, long_ago))
    store.remove_partial_files()
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [live.name, "a.tar"]


def claim(folder: str, number: int) -> bool:
    return open_store(folder).put_if_absent("lease", str(number).encode())


def test_one_of_several_processes_puts_an_absent_object(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        won = pool.starmap(claim, [(str(tmp_path), number) for number in range(16)])
    assert sum(won) == 1
    assert open_store(str(tmp_path)).read("lease") == str(won.index(True)).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_puts_an_absent_object_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "link", refuse)
    store = open_store(str(tmp_path))
    assert [store.put_if_absent("lease", content) for content in (b"mine", b"yours")] == [True, False]
    assert store.read("lease") == b"mine"
