"""The client of Alluxio's REST pages, against a double of the workers."""

import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.alluxio_double import PAGE_BYTES, Answer, Worker, broken_off, dropped, long, short, stale, status, trickle
from tests.unit.storage.doors import part
from ttv_train.config import StorageConfig
from ttv_train.storage import alluxio, open_store
from ttv_train.storage.breaker import FAILURES
from ttv_train.storage.counters import counters, difference
from ttv_train.storage.opening import open_door

CONTENT = os.urandom(5 * PAGE_BYTES + 1000)


def slow(answer: Answer) -> None:
    time.sleep(0.01)


@pytest.fixture
def workers(tmp_path) -> Iterator[list[Worker]]:
    """Three workers of one under-store that holds one object."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.tar").write_bytes(CONTENT)
    running = [Worker(tmp_path) for _ in range(3)]
    yield running
    for worker in running:
        worker.stop()


def make_config(url: str, folder) -> StorageConfig:
    return StorageConfig(
        under_stores={url: f"file://{folder}"}, alluxio_page_bytes=PAGE_BYTES, timeout_seconds=0.5, deadline_seconds=20
    )


@pytest.fixture
def url(workers) -> str:
    return "alluxio://" + ",".join(f"127.0.0.1:{worker.port}" for worker in workers)


@pytest.fixture
def store(url, tmp_path):
    return open_store(f"{url}/set", make_config(url, tmp_path))


@pytest.fixture
def counted():
    """What was counted since the test began, without the tiers that gave no bytes."""
    before = counters.snapshot()

    def since() -> dict:
        found = difference(counters.snapshot(), before)
        return {**found, "bytes": {tier: count for tier, count in found["bytes"].items() if count}}

    return since


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10), (PAGE_BYTES - 5, 10), (3, 3 * PAGE_BYTES), (0, len(CONTENT)), (len(CONTENT) - 7, 7)]
)
def test_ranges_come_from_the_pages(store, counted, offset, length):
    assert store.read_range(part(offset, length, "a.tar", CONTENT)) == CONTENT[offset : offset + length]
    assert counted()["bytes"] == {"alluxio": length}
    assert counted()["page_misses"] == 0


def test_a_whole_object(store):
    assert store.read("a.tar") == CONTENT
    assert (store.size("a.tar"), store.exists("b.tar")) == (len(CONTENT), False)
    with pytest.raises(FileNotFoundError):
        store.read("b.tar")
    assert store.read("a.tar", len(CONTENT) - 5, 100) == CONTENT[-5:]


def test_a_page_that_was_evicted_is_read_through(store, workers, counted):
    for worker in workers:
        worker.evicted = {("set/a.tar", 1)}
    assert store.read_range(part(0, 3 * PAGE_BYTES, "a.tar", CONTENT)) == CONTENT[: 3 * PAGE_BYTES]
    assert counted()["page_misses"] == 1
    assert counted()["bytes"] == {"alluxio": 2 * PAGE_BYTES, "under_store": PAGE_BYTES}


def test_a_page_that_another_worker_holds_is_found(store, workers, counted):
    for worker in workers[:2]:
        worker.evicted = {("set/a.tar", None)}
    assert store.read("a.tar", 0, 2 * PAGE_BYTES) == CONTENT[: 2 * PAGE_BYTES]
    assert counted()["page_misses"] == 0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (status(500), "http_500"),
        (status(503, attempts=3), "http_503"),
        (status(413), "http_413"),
        (broken_off, "short"),
        (short, "short"),
        (long, "long"),
        (stale, "corrupt"),
        (trickle, "timeout"),
    ],
)
def test_faults_are_counted_and_never_data(store, workers, counted, fault, kind):
    for worker in workers:
        worker.fault = fault
    wanted = [part(PAGE_BYTES * i, 20_000, "a.tar", CONTENT) for i in range(2)]
    assert store.read_many(wanted) == [CONTENT[PAGE_BYTES * i :][:20_000] for i in range(2)]
    assert counted()["errors"][kind] > 0


def test_an_object_overwritten_behind_alluxio_comes_from_the_under_store(store, workers, counted):
    def outdated(answer: Answer) -> None:
        answer.body = bytes(len(answer.body))

    for worker in workers:
        worker.fault = outdated
    assert store.read_range(part(10, 2 * PAGE_BYTES, "a.tar", CONTENT)) == CONTENT[10 : 10 + 2 * PAGE_BYTES]
    assert counted()["bytes"]["under_store"] == 2 * PAGE_BYTES
    assert counted()["fallbacks"] == 1
    assert counted()["errors"]["corrupt"] > 0


def test_an_object_cut_off_behind_alluxio_is_never_data(store, tmp_path):
    os.truncate(tmp_path / "set/a.tar", 2 * PAGE_BYTES)
    with pytest.raises(OSError):
        store.read_range(part(0, 3 * PAGE_BYTES, "a.tar", CONTENT))


def read_parts(url: str, folder: Path, seed: int) -> bool:
    wanted = [part(i * 20_000, 20_000, "a.tar", CONTENT) for i in range(10)]
    random.Random(seed).shuffle(wanted)
    store = open_store(f"{url}/set", make_config(url, folder))
    return [CONTENT[each.offset :][: each.length] for each in wanted] == store.read_many(wanted)


def test_two_readers_while_a_worker_is_killed_and_comes_back(url, workers, tmp_path):
    workers[0].fault = workers[1].fault = workers[2].fault = slow
    with ThreadPoolExecutor() as pool:
        reading = [
            pool.submit(lambda seed=seed: all(read_parts(url, tmp_path, seed) for _ in range(4))) for seed in (0, 1)
        ]
        while not (asked := [number for number, worker in enumerate(workers) if worker.requests]):
            time.sleep(0.001)
        workers[asked[0]].stop()
        time.sleep(0.2)
        workers[asked[0]] = Worker(tmp_path, port=workers[asked[0]].port)
        assert [future.result() for future in reading] == [True, True]


def test_a_closed_connection_is_read_elsewhere(store, workers, counted):
    for worker in workers:
        worker.fault = dropped
    assert store.read_range(part(0, 1000, "a.tar", CONTENT)) == CONTENT[:1000]
    assert counted()["bytes"] == {"under_store": 1000}


def test_workers_that_are_down_are_left_out_after_a_while(store, workers, counted, url, tmp_path):
    door = open_door(f"{url}/set", make_config(url, tmp_path))
    _, first_port = door._ring(door._uri("a.tar"), 0)[0]
    for worker in sorted(workers, key=lambda worker: worker.port != first_port)[:2]:
        worker.stop()
    for _ in range(FAILURES):
        assert store.read("a.tar") == CONTENT
    assert counted()["page_misses"] == 0
    refused = counted()["errors"]["connection"]
    assert refused >= FAILURES
    assert store.read("a.tar") == CONTENT
    assert counted()["errors"]["connection"] == refused


def test_without_any_worker_the_under_store_serves(store, workers, counted):
    for worker in workers:
        worker.stop()
    assert store.read_range(part(0, len(CONTENT), "a.tar", CONTENT)) == CONTENT
    assert counted()["bytes"] == {"under_store": len(CONTENT)}


def test_the_list_of_workers_follows_the_name_service(workers, tmp_path, monkeypatch):
    members = ["127.0.0.1"]

    real = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **options: object) -> list[tuple[object, ...]]:
        if host != "workers.local":
            return real(host, *arguments, **options)
        if not members:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, arguments[0])) for address in members]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"alluxio://workers.local:{workers[0].port}"
    door = open_door(f"{url}/set", make_config(url, tmp_path))
    now = [0.0]
    monkeypatch.setattr(door, "_clock", lambda: now[0])
    assert door._members() == [("127.0.0.1", workers[0].port)]
    members[:] = ["127.0.0.2", "127.0.0.3"]
    assert len(door._members()) == 1
    now[0] += alluxio.MEMBERSHIP_SECONDS
    assert [address for address, _ in door._members()] == ["127.0.0.2", "127.0.0.3"]
    members.clear()
    now[0] += alluxio.MEMBERSHIP_SECONDS
    assert len(door._members()) == 2
    assert door.read("a.tar") == CONTENT


def test_a_worker_that_joins_takes_pages_over_and_moves_no_others(url, tmp_path, workers):
    door = open_door(url, make_config(url, tmp_path))
    before = {key: door._ring("file:///a", key) for key in range(200)}
    door._workers = door._workers[:2]
    after = {key: door._ring("file:///a", key) for key in range(200)}
    assert all(after[key] == [worker for worker in before[key] if worker in door._workers] for key in before)
    assert {ring[0] for ring in before.values()} == {("127.0.0.1", worker.port) for worker in workers}


def test_warming_loads_and_says_what_is_cached(store, workers):
    for worker in workers:
        worker.evicted = {("set/a.tar", None)}
    assert store.cached_fraction("a.tar") == 0
    workers[1].evicted = {("set/a.tar", 0), ("set/a.tar", 1), ("set/a.tar", 2)}
    assert store.cached_fraction("a.tar") == 0.5
    assert store.warm(["a.tar"])
    assert store.cached_fraction("a.tar") == 1


def test_writes_go_to_the_under_store(store, tmp_path):
    store.put("b.tar", b"new")
    assert (tmp_path / "set/b.tar").read_bytes() == b"new"
    assert not store.put_if_absent("b.tar", b"other")
    store.delete("b.tar")
    assert not (tmp_path / "set/b.tar").exists()
