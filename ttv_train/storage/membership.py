"""Which workers an Alluxio 3.x has, and which of them is asked first for an object.

``alluxio://worker-1:28080,worker-2:28080`` names them; a host name that resolves to several addresses, such as a
headless service of Kubernetes, stands for all of them. ``alluxio+etcd://etcd-1:2379,etcd-2:2379`` names the etcd in
which the workers register themselves: it also has their identities on Alluxio's hash ring, which say who holds what.

etcd is asked through its HTTP/JSON gateway (``POST /v3/kv/range``). The keys, their JSON and the ring are those of the
published `alluxio` package 1.0.0, which itself does not run beside a protobuf of today.
"""

import base64
import bisect
import hashlib
import json
import socket
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Protocol
from urllib.parse import urlsplit

from ttv_train.errors import UserError
from ttv_train.storage.http_client import HttpClient

WORKER_PORT, ETCD_PORT = 28080, 2379
ETCD_TIMEOUT_SECONDS = 3.0
"""Reads wait for a look-up; another etcd is asked after that."""
VIRTUAL_NODES = 5
"""Of a worker on the ring: ``alluxio.user.consistent.hash.virtual.node.count.per.worker``."""
RING_ATTEMPTS = 100

Worker = tuple[str, int]
"""Host and port of its REST pages."""


class Membership(Protocol):
    """Where the list of workers comes from."""

    def look_up(self) -> Collection[Worker]:
        """The workers there are now; none if nobody says."""
        ...

    def order(self, workers: Sequence[Worker], uri: str, page: int) -> list[Worker]:
        """`workers` in the order in which they are asked for a page of the object `uri`."""
        ...


class NamedWorkers:
    """The workers of a URL's host names. Satisfies `Membership`.

    Raises:
        UserError: the URL has no host.
    """

    def __init__(self, url: str) -> None:
        self._hosts = parse_hosts(url, WORKER_PORT)

    def look_up(self) -> Collection[Worker]:
        """See `Membership.look_up`."""
        return {worker for host in self._hosts for worker in _addresses(host)}

    def order(self, workers: Sequence[Worker], uri: str, page: int) -> list[Worker]:
        """See `Membership.order`. Rendezvous hashing: a worker that comes or goes moves its own pages only."""
        return sorted(workers, key=lambda worker: hashlib.sha256(f"{worker}{uri}/{page}".encode()).digest())


class EtcdWorkers:
    """The workers that have registered in etcd, in the order of Alluxio's own hash ring. Satisfies `Membership`.

    Args:
        url: ``alluxio+etcd://HOST:PORT[,HOST:PORT...]/PATH``
        cluster: the servers' ``alluxio.cluster.name``.

    Raises:
        UserError: the URL has no host, or mmh3 is not installed.
    """

    def __init__(self, url: str, cluster: str) -> None:
        self._hosts = parse_hosts(url, ETCD_PORT)
        self._prefix = f"/ServiceDiscovery/{cluster}/".encode()
        self._client = HttpClient(ETCD_TIMEOUT_SECONDS)
        self._mmh3 = _import_mmh3()
        self._ring: list[tuple[int, Worker]] = []

    def look_up(self) -> Collection[Worker]:
        """See `Membership.look_up`."""
        # A range ends before the first key that does not start with the prefix.
        range_end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        request = json.dumps({"key": _encoded(self._prefix), "range_end": _encoded(range_end)}).encode()
        for host in self._hosts:
            try:
                answer = json.loads(self._client.post(f"{base_url(host)}/v3/kv/range", request))
                entries = [json.loads(base64.b64decode(pair["value"])) for pair in answer.get("kvs", [])]
                identities = {_address_of(entry): entry["Identity"] for entry in entries}
                ring = [
                    (self._node_hash(bytes.fromhex(identity["identifier"]), int(identity["version"]), node), worker)
                    for worker, identity in identities.items()
                    for node in range(VIRTUAL_NODES)
                ]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # this one is down, or what it says is no list of workers
            if ring:
                self._ring = sorted(ring)
            return set(identities)
        return set()

    def order(self, workers: Sequence[Worker], uri: str, page: int) -> list[Worker]:
        """See `Membership.order`. One worker holds all pages of an object; the next ones are those to which Alluxio's
        clients turn when it is down."""
        found: list[Worker] = []
        ring = self._ring
        for attempt in range(1, RING_ATTEMPTS + 1 if ring else 1):
            position = bisect.bisect_right(ring, self._hash(uri.encode() + attempt.to_bytes(4, "little")), key=_node)
            worker = ring[position % len(ring)][1]
            if worker in workers and worker not in found:
                found.append(worker)
            if len(found) == len(workers):
                break
        return found + [worker for worker in workers if worker not in found]

    def _node_hash(self, identifier: bytes, version: int, node: int) -> int:
        return self._hash(identifier + version.to_bytes(4, "little") + node.to_bytes(4, "little"))

    def _hash(self, data: bytes) -> int:
        return int(self._mmh3.hash(data))


def parse_hosts(url: str, default_port: int) -> list[Worker]:
    """Hosts and ports before a URL's path. Raises UserError if there are none."""
    hosts = []
    parts = urlsplit(url)
    scheme = parts.scheme
    for part in parts.netloc.split(","):
        host, _, port = part.rpartition(":") if ":" in part else (part, "", str(default_port))
        if not host or not port.isdigit():
            raise UserError(
                f"{url!r} is not {scheme}://HOST:PORT[,HOST:PORT...]/PATH; the port is {default_port} by default"
            )
        hosts.append((host, int(port)))
    return hosts


def base_url(worker: Worker) -> str:
    """``http://HOST:PORT``."""
    host, port = worker
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _addresses(worker: Worker) -> list[Worker]:
    host, port = worker
    try:
        return [(str(info[4][0]), port) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _address_of(entry: dict[str, dict[str, str | int]]) -> Worker:
    address = entry["WorkerNetAddress"]
    return str(address["Host"]), int(address.get("HttpServerPort", WORKER_PORT))


def _node(entry: tuple[int, Worker]) -> int:
    return entry[0]


def _encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _import_mmh3() -> ModuleType:
    try:
        import mmh3
    except ImportError:
        raise UserError("alluxio+etcd:// needs mmh3: pip install 'ttv-train[alluxio]'") from None
    return mmh3
