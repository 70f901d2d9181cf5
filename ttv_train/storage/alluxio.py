"""Alluxio 3.x (DORA): the REST pages that its workers serve on port 28080.

``alluxio://worker-1:28080,worker-2:28080/path`` or ``alluxio+etcd://etcd-1:2379/path``, see `membership`.
`storage.under_stores` says where the same path lies in the under-store: a worker knows a file by the SHA-256 of its URI
there.

Protocol, read from the published 312 and 313 servers:

    GET /v1/file/ID/page/N?offset=&length=   a part of page N; the connection is closed when the page is not cached
    GET /v1/load?path=&opType=submit         loads a file into the cache; opType=progress tells how far it is
    GET /v1/info?path=                       JSON with mLength
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

from ttv_train.storage.base import Door, check_object_name
from ttv_train.storage.breaker import CircuitBreaker
from ttv_train.storage.counters import counters
from ttv_train.storage.failures import DamagedReadError, HttpStatusError, kind_of
from ttv_train.storage.http_client import HttpClient
from ttv_train.storage.layer import PassThrough
from ttv_train.storage.membership import Membership, Worker, base_url
from ttv_train.storage.ranges import Content

WORKERS_PER_PAGE = 3
"""Workers that are asked for a page before the under-store is: its owner is among the first of the ring, or has just
left."""
MEMBERSHIP_SECONDS = 30.0
"""Between two look-ups of the workers' addresses."""
LOAD_POLL_SECONDS = 0.5


class AlluxioStore(PassThrough[Door]):
    """Pages from the workers, read through from the under-store where no worker has them.

    The under-store decides what there is, and takes what is written: workers may know an old length, and a page that is
    written to a worker never reaches it.

    Args:
        url: ``alluxio://HOST:PORT[,HOST:PORT...]/PATH``
        membership: of its workers.
        under_store: the door to the same objects in the under-store, with its own credentials.
        page_bytes: the workers' ``alluxio.worker.page.store.page.size``.
        timeout_seconds: of one request.
        load_timeout_seconds: how long `warm` waits for a load job.
    """

    def __init__(
        self,
        url: str,
        membership: Membership,
        under_store: Door,
        *,
        page_bytes: int,
        timeout_seconds: float,
        load_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(under_store)
        self.url, self.tier = url, "alluxio"
        self._page_bytes, self._load_timeout_seconds, self._clock = page_bytes, load_timeout_seconds, clock
        self._membership = membership
        self._client = HttpClient(timeout_seconds)
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._look_up_at = 0.0
        self._breakers: dict[Worker, CircuitBreaker] = {}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """See `Store.read`."""
        if length is None:
            size = self.size(name)
            if size is None:
                raise FileNotFoundError(f"{self.url}/{name}")
            length = max(0, size - offset)
        parts = []
        position, end = offset, offset + length
        while position < end:
            number, start = divmod(position, self._page_bytes)
            wanted = min(end - position, self._page_bytes - start)
            part = self._page(name, number, start, wanted)
            parts.append(part)
            position += len(part)
            if len(part) < wanted:  # the under-store says that the object ends here
                break
        return b"".join(parts)

    def warm(self, names: Sequence[str]) -> bool:
        """Submits a load job per object and waits for them. Raises OSError if one fails."""
        for name in names:
            self._load(name, "submit")
        deadline = self._clock() + self._load_timeout_seconds
        for name in names:
            while "SUCCEEDED" not in (progress := self._load(name, "progress")):
                if "FAILED" in progress or "STOPPED" in progress or self._clock() > deadline:
                    raise OSError(f"{self.url}: loading {name} did not succeed: {progress[:200]}")
                time.sleep(LOAD_POLL_SECONDS)
        return True

    def cached_fraction(self, name: str) -> float | None:
        """See `Store.cached_fraction`: asks for one byte of every page."""
        size = self.size(name)
        if not size:
            return None
        pages = range(-(-size // self._page_bytes))
        return sum(self._from_workers(name, number, 0, 1) is not None for number in pages) / len(pages)

    def _page(self, name: str, number: int, start: int, length: int) -> Content:
        cached = self._from_workers(name, number, start, length)
        if cached is not None:
            return cached
        counters.add("page_misses")
        content = self.inner.read(name, number * self._page_bytes + start, length)
        counters.move(self.tier, "under_store", len(content))
        return content

    def _from_workers(self, name: str, number: int, start: int, length: int) -> bytearray | None:
        """A part of a page, from the first worker that has it; None if no worker gives it whole."""
        file_id = self._file_id(name)
        for worker in self._ring(self._uri(name), number)[:WORKERS_PER_PAGE]:
            url = f"{base_url(worker)}/v1/file/{file_id}/page/{number}?offset={start}&length={length}"
            try:
                content = self._client.get(url)
                if len(content) != length:
                    kind = "short" if len(content) < length else "long"
                    raise DamagedReadError(kind, f"{len(content)} bytes of {length} came of page {number}")
            except OSError as error:
                # A closed connection says that the page is not cached: the worker itself is well.
                is_down = isinstance(error, ConnectionRefusedError | TimeoutError | HttpStatusError)
                self._breaker(worker).record(not is_down)
                if is_down or isinstance(error, DamagedReadError):
                    counters.add_error(kind_of(error))
                continue
            self._breaker(worker).record(True)
            return content
        return None

    def _ring(self, uri: str, page: int) -> list[Worker]:
        """Workers in the order in which they are asked, without those whose circuit is open."""
        workers = [worker for worker in self._members() if self._breaker(worker).allows()]
        return self._membership.order(workers, uri, page)

    def _members(self) -> list[Worker]:
        with self._lock:
            if self._clock() >= self._look_up_at:
                found = self._membership.look_up()
                if found or not self._workers:  # a name service that is down takes no worker away
                    self._workers = sorted(found)
                self._look_up_at = self._clock() + MEMBERSHIP_SECONDS
            return self._workers

    def _breaker(self, worker: Worker) -> CircuitBreaker:
        with self._lock:
            return self._breakers.setdefault(worker, CircuitBreaker(self._clock))

    def _file_id(self, name: str) -> str:
        return hashlib.sha256(self._uri(name).encode()).hexdigest()

    def _uri(self, name: str) -> str:
        return f"{self.inner.url.rstrip('/')}/{check_object_name(name)}"

    def _load(self, name: str, operation: str) -> str:
        request = f"/v1/load?path={self._uri(name)}&opType={operation}"
        failure: OSError = ConnectionError(f"{self.url} has no worker")
        for worker in self._ring(self._uri(name), 0):
            try:
                return self._client.get(base_url(worker) + request).decode(errors="replace")
            except OSError as error:
                failure = error
        raise failure
