import errno
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import xxhash

from tests.unit.storage.doors import CONTENT, ScriptedDoor, batched, failing, part
from ttv_train.storage.counters import counters
from ttv_train.storage.integrity import VerifiedReads
from ttv_train.storage.local_tier import LocalTier
from ttv_train.storage.partial import PARTIAL_PREFIX
from ttv_train.storage.posix import PARTIAL_LIFETIME_SECONDS
from ttv_train.storage.ranges import ByteRange


def make_tier(folder: Path, door, max_bytes=10_000) -> LocalTier:
    return LocalTier(VerifiedReads(batched(door)), folder, max_bytes, lock_timeout_seconds=10)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("??/*") if path.is_file()]


def test_a_range_is_read_once_and_then_from_the_disk(tmp_path):
    door = ScriptedDoor()
    before = counters.snapshot()
    assert [make_tier(tmp_path, door).read_range(part(3, 9)) for _ in range(3)] == [CONTENT[3:12]] * 3
    assert door.reads == [("a", 3, 9)]
    after = counters.snapshot()
    assert (after["cache_hits"] - before["cache_hits"], after["cache_misses"] - before["cache_misses"]) == (2, 1)


def test_what_has_no_digest_is_never_kept(tmp_path):
    door = ScriptedDoor()
    tier = make_tier(tmp_path, door)
    assert [tier.read("a", 0, 4), tier.read("a", 0, 4)] == [CONTENT[:4]] * 2
    assert (len(door.reads), entries(tmp_path)) == (2, [])


def test_a_damaged_entry_is_replaced(tmp_path):
    tier = make_tier(tmp_path, ScriptedDoor())
    tier.read_range(part(0, 8))
    (entry,) = entries(tmp_path)
    entry.write_bytes(b"12345678")
    assert tier.read_range(part(0, 8)) == CONTENT[:8]
    assert entry.read_bytes() == CONTENT[:8]


def test_the_longest_unused_entries_go(tmp_path):
    content = os.urandom(100_000)
    tier = make_tier(tmp_path, ScriptedDoor({"a": content}), max_bytes=10_000)
    ranges = [part(1000 * number, 1000, content=content) for number in range(30)]
    for number, wanted in enumerate(ranges):
        assert tier.read_range(wanted) == content[1000 * number : 1000 * number + 1000]
        assert sum(path.stat().st_size for path in entries(tmp_path)) <= 10_000
        if tier.holds(wanted.sha256):
            os.utime(tmp_path / wanted.sha256[:2] / wanted.sha256, (number, number))
        if tier.holds(ranges[0].sha256):
            tier.read_range(ranges[0])  # in use all the time
    assert tier.holds(ranges[0].sha256)
    assert not tier.holds(ranges[1].sha256)


def test_a_full_disk_is_reported_once_and_costs_nothing_but_the_cache(tmp_path, monkeypatch, caplog):
    tier = make_tier(tmp_path, ScriptedDoor())

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        assert [tier.read_range(part(0, 8)), tier.read_range(part(8, 8))] == [CONTENT[:8], CONTENT[8:16]]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert not entries(tmp_path)


def test_a_disk_that_others_have_filled_is_left_alone(tmp_path, monkeypatch):
    door = ScriptedDoor()
    tier = make_tier(tmp_path, door)
    tier.read_range(part(0, 8))
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_blocks, f_frsize = real.f_blocks // 100, real.f_blocks, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert [tier.read_range(part(8, 8)), tier.read_range(part(0, 8))] == [CONTENT[8:16], CONTENT[:8]]
    assert len(entries(tmp_path)) == 1
    assert len(door.reads) == 2


def test_a_folder_that_cannot_be_made_costs_nothing_but_the_cache(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert make_tier(tmp_path / "file" / "cache", ScriptedDoor()).read_range(part(0, 8)) == CONTENT[:8]


def test_a_failed_read_is_not_kept(tmp_path):
    door = ScriptedDoor(faults=[failing(ConnectionResetError())])
    tier = make_tier(tmp_path, door)
    with pytest.raises(ConnectionResetError):
        tier.read_range(part(0, 8))
    assert tier.read_range(part(0, 8)) == CONTENT[:8]


def test_partial_files_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "ab").mkdir()
    old, new = tmp_path / "ab" / f"{PARTIAL_PREFIX}old", tmp_path / "ab" / f"{PARTIAL_PREFIX}new"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, time.time() - PARTIAL_LIFETIME_SECONDS - 1))
    make_tier(tmp_path, ScriptedDoor())
    assert (old.exists(), new.exists()) == (False, True)


class SlowDoor(ScriptedDoor):
    """Takes its time and leaves a line per read."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {offset}\n")
        time.sleep(0.2)
        return super().read(name, offset, length)


def read_all(folder: Path, log: Path) -> list[bytes]:
    results = make_tier(folder, SlowDoor(log)).read_many([part(8 * number, 8) for number in range(3)])
    return [bytes(result) for result in results]


def test_processes_that_want_the_same_download_it_once(tmp_path):
    log = tmp_path / "log"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(read_all, [(tmp_path / "cache", log)] * 4)
    assert results == [[CONTENT[0:8], CONTENT[8:16], CONTENT[16:24]]] * 4
    assert len(log.read_text().splitlines()) == 1  # neighbours, so one request


def hold_the_locks(folder: Path, started) -> None:
    class Stuck(ScriptedDoor):
        def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
            started.set()
            time.sleep(600)
            return b""

    make_tier(folder, Stuck()).read_range(part(0, 8))


def test_a_process_killed_in_a_download_leaves_no_lock_behind(tmp_path):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=hold_the_locks, args=(tmp_path, started))
    process.start()
    assert started.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert make_tier(tmp_path, ScriptedDoor()).read_range(part(0, 8)) == CONTENT[:8]


def test_a_range_larger_than_the_cache_is_passed_on(tmp_path):
    tier = make_tier(tmp_path, ScriptedDoor(), max_bytes=4)
    assert tier.read_range(part(0, 8)) == CONTENT[:8]
    assert not entries(tmp_path)


def test_results_keep_their_order(tmp_path):
    tier = make_tier(tmp_path, ScriptedDoor())
    tier.read_range(part(8, 8))
    wanted = [part(16, 8), part(8, 8), ByteRange("b", 0, 8), part(0, 8), part(16, 8)]
    first, second, missing, third, again = tier.read_many(wanted)
    assert [first, second, third, again] == [CONTENT[16:24], CONTENT[8:16], CONTENT[:8], CONTENT[16:24]]
    assert isinstance(missing, FileNotFoundError)


def test_a_dataset_cannot_put_its_bytes_in_the_place_of_anothers(tmp_path):
    forged = b"x" * 8
    tier = make_tier(tmp_path, ScriptedDoor({"a": CONTENT, "forged": forged}))
    claimed = ByteRange("forged", 0, 8, part(0, 8).sha256, xxhash.xxh3_128_hexdigest(forged))
    assert tier.read_range(claimed) == forged  # as its own index says
    assert not tier.holds(claimed.sha256)
    assert tier.read_range(part(0, 8)) == CONTENT[:8]
