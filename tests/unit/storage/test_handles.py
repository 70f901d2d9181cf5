import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ttv_train.storage import handles, open_store
from ttv_train.storage.handles import FileHandles


def open_files(folder: Path) -> list[str]:
    targets = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sorted(str(target) for target in targets if target.is_relative_to(folder))


def test_a_file_is_opened_once_for_one_reader_after_the_other(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a", b"0123456789")
    for offset in range(5):
        assert store.read("a", offset, 2) == b"0123456789"[offset : offset + 2]
    assert open_files(tmp_path) == [str(tmp_path / "a")]
    del store
    assert open_files(tmp_path) == []


def test_readers_at_the_same_time_have_handles_of_their_own(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    pool = FileHandles()
    with pool.lend(tmp_path / "a") as first, pool.lend(tmp_path / "a") as second:
        assert first != second
    with pool.lend(tmp_path / "a") as third:
        assert third in (first, second)


def test_a_handle_whose_reader_failed_is_closed(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    pool = FileHandles()
    with pytest.raises(OSError), pool.lend(tmp_path / "a"):
        raise OSError("broken")
    assert open_files(tmp_path) == []


def test_idle_handles_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(handles, "MAX_IDLE", 3)
    store = open_store(str(tmp_path))
    for number in range(8):
        store.put(str(number), b"x")
        store.read(str(number), 0, 1)
    assert [Path(name).name for name in open_files(tmp_path)] == ["5", "6", "7"]


def test_what_is_replaced_or_deleted_is_not_read_from_an_old_handle(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a", b"old")
    assert store.read("a", 0, 3) == b"old"
    store.put("a", b"new")
    assert store.read("a", 0, 3) == b"new"
    store.delete("a")
    with pytest.raises(FileNotFoundError):
        store.read("a", 0, 3)


def test_many_threads_read_right(tmp_path):
    store = open_store(str(tmp_path))
    content = os.urandom(10_000)
    store.put("a", content)
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda offset: store.read("a", offset, 100), range(0, 10_000, 100))
        assert b"".join(parts) == content


def test_a_length_beyond_the_end_takes_no_memory_for_it(tmp_path):
    store = open_store(str(tmp_path))
    store.put("a", b"0123")
    assert store.read("a", 2, 2**60) == b"23"
