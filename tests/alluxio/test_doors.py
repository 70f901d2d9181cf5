"""A store in a real Alluxio, through its mount and its S3 API."""

import hashlib
import multiprocessing
import os
import random
import time

import pytest

from tests.alluxio.conftest import CACHE_MIB
from ttv_train.config import StorageConfig
from ttv_train.storage import ByteRange, open_store
from ttv_train.storage.usage import WorkerMetrics

CONFIG = StorageConfig(timeout_seconds=15, deadline_seconds=60)
MIB = 2**20


def write_object(folder, name: str, size: int) -> bytes:
    """A new object in the under-store, which Alluxio has not seen."""
    content = os.urandom(size)
    (folder.ufs / name).write_bytes(content)
    return content


def part(name: str, content: bytes, offset: int, length: int) -> ByteRange:
    return ByteRange(name, offset, length, hashlib.sha256(content[offset : offset + length]).hexdigest())


def test_the_second_read_is_a_hit(folder, cluster):
    content = write_object(folder, "a.tar", 6 * MIB)
    store = open_store(folder.url, CONFIG)
    metrics = WorkerMetrics([cluster.metrics])
    assert store.read("a.tar") == content
    assert metrics.under_store_bytes() >= len(content)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # blocks enter the cache a moment after they were read
        before = metrics.under_store_bytes()
        assert store.read("a.tar") == content
        if metrics.under_store_bytes() == before:
            return
        time.sleep(0.2)
    pytest.fail("the object never came from the cache alone")


def test_ranges(folder):
    content = write_object(folder, "a.tar", 5 * MIB)
    store = open_store(folder.url, CONFIG)
    edges = [(0, 1), (4 * MIB - 3, 7), (5 * MIB - 9, 9), (123, 2 * MIB), (0, 5 * MIB)]
    wanted = [part("a.tar", content, offset, length) for offset, length in edges]
    assert store.read_many(wanted) == [content[offset : offset + length] for offset, length in edges]
    assert store.read("a.tar", 5 * MIB - 4, 100) == content[-4:]
    assert store.read("a.tar", 5 * MIB, 100) == b""
    assert (store.size("a.tar"), store.size("b.tar")) == (5 * MIB, None)
    with pytest.raises(FileNotFoundError):
        store.read("b.tar")


def test_writes_reach_the_under_store(folder):
    store = open_store(folder.url, CONFIG)
    content = os.urandom(9 * MIB)
    store.put("shards/a.tar", content)
    store.put("manifest.json", b"old")
    store.put("manifest.json", b"newer")
    assert [store.put_if_absent("lease", b"mine"), store.put_if_absent("lease", b"yours")] == [True, False]
    assert (folder.ufs / "shards/a.tar").read_bytes() == content == store.read("shards/a.tar")
    assert (folder.ufs / "manifest.json").read_bytes() == b"newer" == store.read("manifest.json")
    assert (folder.ufs / "lease").read_bytes() == b"mine"
    for name in ("units/a", "units/b"):
        store.put(name, b"x")
    store.delete_folder("units")
    store.delete("lease")
    assert sorted(path.name for path in folder.ufs.iterdir()) == ["manifest.json", "shards"]


def test_a_cache_of_a_third_of_the_data_evicts_and_stays_right(folder, cluster):
    contents = {f"{number}.tar": write_object(folder, f"{number}.tar", 6 * MIB) for number in range(CACHE_MIB * 3 // 6)}
    store = open_store(folder.url, CONFIG)
    metrics = WorkerMetrics([cluster.metrics])
    for name, content in contents.items():
        assert store.read(name) == content
    first_pass = metrics.under_store_bytes()
    generator = random.Random(0)
    wanted = [
        part(name, contents[name], generator.randrange(5 * MIB), MIB)
        for name in generator.choices(list(contents), k=40)
    ]
    assert not any(isinstance(result, OSError) for result in store.read_many(wanted))
    assert metrics.under_store_bytes() > first_pass


def read_shuffled(url: str, wanted: list[ByteRange], seed: int) -> bool:
    mine = random.Random(seed).sample(wanted, len(wanted))
    return not any(isinstance(result, OSError) for result in open_store(url, CONFIG).read_many(mine))


def test_two_processes_at_once(folder):
    contents = {f"{number}.tar": write_object(folder, f"{number}.tar", 2 * MIB) for number in range(4)}
    wanted = [part(name, content, i * MIB // 4, MIB // 4) for name, content in contents.items() for i in range(8)]
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        assert pool.starmap(read_shuffled, [(folder.url, wanted, seed) for seed in range(2)]) == [True, True]


def test_any_s3_endpoint_through_the_environment(cluster, monkeypatch):
    """`s3://` as for Amazon's, here with Alluxio's proxy behind it."""
    (cluster.ufs / "s3-bucket").mkdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cluster.ports['proxy.web']}/api/v1/s3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none-needed")
    store = open_store("s3://s3-bucket/set", CONFIG)
    content = os.urandom(3 * MIB)
    store.put("shards/a.tar", content)
    assert store.read_range(part("shards/a.tar", content, 5, 2 * MIB)) == content[5 : 5 + 2 * MIB]
    assert (store.size("shards/a.tar"), store.exists("b")) == (3 * MIB, False)
    with pytest.raises(FileNotFoundError):
        store.read("b")
    store.delete_folder("shards")
    assert not store.exists("shards/a.tar")
