"""Workers found in etcd, against a double of its HTTP/JSON gateway and doubles of the workers."""

import base64
import json
import os
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.alluxio_double import PAGE_BYTES, Worker
from ttv_train.config import StorageConfig
from ttv_train.errors import UserError
from ttv_train.storage import open_store
from ttv_train.storage.alluxio import MEMBERSHIP_SECONDS
from ttv_train.storage.counters import counters, difference
from ttv_train.storage.membership import EtcdWorkers, NamedWorkers, parse_hosts
from ttv_train.storage.opening import open_door

pytest.importorskip("mmh3", reason="needs mmh3: pip install 'ttv-train[alluxio]'")

CONTENT = os.urandom(3 * PAGE_BYTES + 100)
PREFIX = "/ServiceDiscovery/DefaultAlluxioCluster/"


def registration(host: str, port: int, number: int) -> bytes:
    """What a worker writes into etcd."""
    identity = {"version": 1, "identifier": uuid.UUID(int=number).hex}
    address = {"Host": host, "ContainerHost": "", "RpcPort": 29999, "WebPort": 30000, "HttpServerPort": port}
    return json.dumps({"Identity": identity, "WorkerNetAddress": address}).encode()


class Etcd:
    """A double of etcd's gateway: ranges of `keys`, sorted; `answer` replaces what it says."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.answer: bytes | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def range(self, request: dict[str, str]) -> bytes:
        first, end = (base64.b64decode(request[name]) for name in ("key", "range_end"))
        pairs = [
            {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
            for key, value in sorted(self.keys.items())
            if first <= key.encode() < end
        ]
        return json.dumps({"header": {}, **({"kvs": pairs, "count": str(len(pairs))} if pairs else {})}).encode()

    def _handler(etcd: "Etcd") -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = etcd.range(request) if etcd.answer is None else etcd.answer
                self.send_response(200 if self.path == "/v3/kv/range" else 404)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    running = Etcd()
    yield running
    running.stop()


@pytest.fixture
def workers(tmp_path) -> Iterator[list[Worker]]:
    (tmp_path / "a.tar").write_bytes(CONTENT)
    running = [Worker(tmp_path) for _ in range(5)]
    yield running
    for worker in running:
        worker.stop()


def register(etcd: Etcd, workers: list[Worker], numbers: list[int]) -> None:
    etcd.keys = {f"{PREFIX}{number}": registration("127.0.0.1", workers[number].port, number) for number in numbers}


def make_config(url: str, folder) -> StorageConfig:
    return StorageConfig(under_stores={url: f"file://{folder}"}, alluxio_page_bytes=PAGE_BYTES, timeout_seconds=2)


def asked(worker: Worker) -> int:
    return worker.requests.total()


def test_the_workers_are_those_under_the_prefix_of_the_cluster(etcd):
    etcd.keys = {
        f"{PREFIX}one": registration("worker-1", 28080, 1),
        f"{PREFIX}two": registration("worker-2", 99, 2),
        "/ServiceDiscovery/Other/one": registration("worker-3", 28080, 3),
        "/DHT/DefaultAlluxioCluster/one": b"not of this kind",
    }
    membership = EtcdWorkers(f"alluxio+etcd://127.0.0.1:{etcd.port}/set", "DefaultAlluxioCluster")
    assert set(membership.look_up()) == {("worker-1", 28080), ("worker-2", 99)}
    other = EtcdWorkers(f"alluxio+etcd://127.0.0.1:{etcd.port}/set", "Other")
    assert set(other.look_up()) == {("worker-3", 28080)}


def test_the_ring_is_that_of_the_published_package(etcd):
    """Expected owners from ConsistentHashProvider.get_multiple_workers(uri, 3) of alluxio 1.0.0."""
    expected = {
        "s3://bucket/set/shards/a.tar": [1, 3, 2],
        "s3://bucket/set/shards/b.tar": [0, 3, 1],
        "file:///data/latents/index.parquet": [4, 1, 3],
        "s3://bucket/set/manifest.json": [1, 0, 4],
    }
    etcd.keys = {f"{PREFIX}{number}": registration(f"worker-{number}", 28080, number) for number in range(5)}
    membership = EtcdWorkers(f"alluxio+etcd://127.0.0.1:{etcd.port}/set", "DefaultAlluxioCluster")
    found = sorted(membership.look_up())
    for uri, owners in expected.items():
        assert [host for host, _ in membership.order(found, uri, 0)[:3]] == [f"worker-{number}" for number in owners]
        assert sorted(membership.order(found, uri, 7)) == found


def test_the_owner_is_asked_first_and_a_changed_list_is_followed_in_mid_read(etcd, workers, tmp_path, monkeypatch):
    url = f"alluxio+etcd://127.0.0.1:{etcd.port}"
    register(etcd, workers, [0, 1, 2])
    door = open_door(url, make_config(url, tmp_path))
    now = [0.0]
    monkeypatch.setattr(door, "_clock", lambda: now[0])
    first = {port: number for number, port in enumerate(worker.port for worker in workers)}
    assert door.read("a.tar") == CONTENT
    (owner,) = [number for number, worker in enumerate(workers) if asked(worker)]
    assert owner == first[door._ring(door._uri("a.tar"), 0)[0][1]]

    workers[owner].stop()  # and its registration goes with its lease
    register(etcd, workers, [number for number in (0, 1, 2, 3, 4) if number != owner])
    before = counters.snapshot()
    assert door.read("a.tar", 0, PAGE_BYTES) == CONTENT[:PAGE_BYTES]  # the old list: its next worker has the page
    now[0] += MEMBERSHIP_SECONDS
    assert door.read("a.tar") == CONTENT
    assert difference(counters.snapshot(), before)["page_misses"] == 0
    assert {port for _, port in door._members()} == {worker.port for worker in workers} - {workers[owner].port}

    for answer in (b"{}", b"no JSON", b'{"kvs": [{"key": "YQ==", "value": "YQ=="}]}'):
        etcd.answer = answer  # takes no worker away
        now[0] += MEMBERSHIP_SECONDS
        assert len(door._members()) == 4


def test_another_etcd_is_asked_when_one_is_down(etcd, workers, tmp_path):
    register(etcd, workers, [0])
    gone = Etcd()
    gone.stop()
    url = f"alluxio+etcd://127.0.0.1:{gone.port},127.0.0.1:{etcd.port}"
    assert open_store(url, make_config(url, tmp_path)).read("a.tar") == CONTENT
    assert asked(workers[0]) == 4


def test_without_any_worker_the_under_store_serves(etcd, tmp_path):
    (tmp_path / "a.tar").write_bytes(CONTENT)
    url = f"alluxio+etcd://127.0.0.1:{etcd.port}"
    before = counters.snapshot()
    store = open_store(url, make_config(url, tmp_path))
    assert store.read("a.tar") == CONTENT
    assert difference(counters.snapshot(), before)["bytes"]["under_store"] == len(CONTENT)
    with pytest.raises(OSError, match="has no worker"):
        store.warm(["a.tar"])


def test_hosts_without_a_port_have_the_default_one():
    assert parse_hosts("alluxio://one,two:99/path", 28080) == [("one", 28080), ("two", 99)]
    for make in (NamedWorkers, lambda url: EtcdWorkers(url, "x")):
        with pytest.raises(UserError, match="HOST:PORT"):
            make("alluxio:///path")
