"""What goes wrong in a real Alluxio: servers that die, and objects that change behind it."""

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.alluxio.test_doors import MIB, part, write_object
from ttv_train.config import StorageConfig
from ttv_train.storage import ByteRange, open_store
from ttv_train.storage.counters import counters, difference

IMPATIENT = StorageConfig(timeout_seconds=2, deadline_seconds=90)


def with_fallback(folder) -> StorageConfig:
    return StorageConfig(timeout_seconds=2, fallback_after_seconds=1, under_stores={folder.url: str(folder.ufs)})


def test_a_worker_killed_in_mid_read_is_waited_for(folder, cluster, respawn):
    contents = {f"{number}.tar": write_object(folder, f"{number}.tar", 2 * MIB) for number in range(8)}
    store = open_store(folder.url, IMPATIENT)
    before = counters.snapshot()
    started = threading.Event()

    def read_all() -> list[bool]:
        right = []
        for number, (name, content) in enumerate(contents.items()):
            if number == 2:
                started.set()
            wanted = [part(name, content, i * MIB // 2, MIB // 2) for i in range(4)]
            right.append(b"".join(store.read_many(wanted)) == content)
        return right

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_all)
        assert started.wait(60)
        cluster.kill("worker")
        time.sleep(4)
        respawn("worker")
        assert reading.result() == [True] * 8
    change = difference(counters.snapshot(), before)
    assert change["retries"] > 0
    assert sum(change["errors"].values()) > 0


def test_while_the_worker_is_dead_reads_go_to_the_under_store(folder, cluster, respawn):
    content = write_object(folder, "a.tar", 2 * MIB)
    store = open_store(folder.url, with_fallback(folder))
    cluster.kill("worker")
    before = counters.snapshot()
    wanted = [part("a.tar", content, i * MIB // 4, MIB // 4) for i in range(8)]
    assert store.read_many(wanted) == [content[i * MIB // 4 : (i + 1) * MIB // 4] for i in range(8)]
    change = difference(counters.snapshot(), before)
    assert change["fallbacks"] > 0
    assert change["bytes"]["under_store"] == 2 * MIB
    respawn("worker")


def test_an_object_cut_off_behind_alluxio_is_never_data(folder):
    content = write_object(folder, "a.tar", 6 * MIB)
    store = open_store(folder.url, StorageConfig(timeout_seconds=3, deadline_seconds=8))
    assert store.size("a.tar") == 6 * MIB  # Alluxio has taken note of its length
    os.truncate(folder.ufs / "a.tar", 2 * MIB)
    with pytest.raises(OSError):
        store.read_range(ByteRange("a.tar", 0, 6 * MIB, hashlib.sha256(content).hexdigest(), is_whole=True))


def test_an_object_overwritten_behind_alluxio_is_read_as_the_manifest_says(folder):
    old = write_object(folder, "a.tar", MIB)
    store = open_store(folder.url, with_fallback(folder))
    wanted = part("a.tar", old, 0, MIB)
    assert store.read_range(wanted) == old
    new = write_object(folder, "a.tar", MIB)
    before = counters.snapshot()
    assert store.read_range(part("a.tar", new, 0, MIB)) == new
    change = difference(counters.snapshot(), before)
    assert change["bytes"]["under_store"] == MIB
    assert change["errors"]["corrupt"] > 0


def test_a_master_that_is_killed_and_comes_back(folder, cluster, respawn):
    content = write_object(folder, "a.tar", MIB)
    store = open_store(folder.url, with_fallback(folder))
    cluster.kill("master")
    before = counters.snapshot()
    assert store.read_range(part("a.tar", content, 0, MIB)) == content
    assert difference(counters.snapshot(), before)["fallbacks"] == 1
    respawn("master")
    deadline = time.monotonic() + 60
    later = write_object(folder, "b.tar", MIB)
    while time.monotonic() < deadline:  # the worker registers with its new master
        before = counters.snapshot()
        assert store.read_range(part("b.tar", later, 0, MIB)) == later
        if difference(counters.snapshot(), before)["fallbacks"] == 0:
            return
        time.sleep(1)
    pytest.fail("reads never came back to Alluxio")
