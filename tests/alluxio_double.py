"""A double of an Alluxio 3.x worker, whose servers are not published: its REST pages, and ranged GETs as its S3 API
answers them. Faults are put in by the test.

The pages follow the servers 312 and 313: a page that is not cached, and any error, closes the connection without an
answer; only `/`, `:` and `?` are unescaped in paths.
"""

import contextlib
import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

PAGE_BYTES = 64 * 1024

Fault = Callable[["Answer"], None]
"""Changes an answer, or raises `DroppedError`."""


class DroppedError(Exception):
    """The connection is closed without an answer."""


class Answer:
    """What is about to be sent. A fault may change it."""

    def __init__(self, status: int, body: bytes, attempt: int) -> None:
        self.status, self.body = status, body
        self.announced = len(body)
        self.bytes_per_second: float | None = None
        self.attempt = attempt
        """How often the same request came before."""


def status(code: int, attempts: int = 1) -> Fault:
    """An error status on the first `attempts` of every request."""

    def fault(answer: Answer) -> None:
        if answer.attempt < attempts:
            answer.status, answer.body = code, b""
            answer.announced = 0

    return fault


def dropped(answer: Answer) -> None:
    """The connection is reset on the first attempt."""
    if answer.attempt == 0:
        raise DroppedError


def broken_off(answer: Answer) -> None:
    """The first attempt ends in the middle of the announced body."""
    if answer.attempt == 0:
        answer.body = answer.body[: len(answer.body) // 2]


def short(answer: Answer) -> None:
    """The first attempt is complete in itself, and shorter than what was asked for."""
    if answer.attempt == 0:
        answer.body = answer.body[: len(answer.body) // 2]
        answer.announced = len(answer.body)


def long(answer: Answer) -> None:
    """The first attempt is complete in itself, and longer than what was asked for."""
    if answer.attempt == 0:
        answer.body += b"more"
        answer.announced = len(answer.body)


def stale(answer: Answer) -> None:
    """The first attempt gives other bytes of the same length."""
    if answer.attempt == 0:
        answer.body = bytes(255 - byte for byte in answer.body)


def trickle(answer: Answer) -> None:
    """The first attempt comes at 1 KB/s."""
    if answer.attempt == 0:
        answer.bytes_per_second = 1024.0


class _Server(ThreadingHTTPServer):
    """Knows its open connections, to break them off."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away in the middle are none."""


class Worker:
    """A worker on 127.0.0.1 for the files under `root`, which is the under-store ``file://ROOT``.

    Attributes:
        fault: applied to every answer that serves data.
        evicted: (path, page) that are not cached; `None` for the page stands for all of a file.
        requests: how often each request came, by its path and range.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = root
        self.fault: Fault | None = None
        self.evicted: set[tuple[str, int | None]] = set()
        self.requests: Counter[str] = Counter()
        self._lock = Lock()
        self._server = _Server(("127.0.0.1", port), self._handler())
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """The worker is gone: its connections break off, new ones are refused."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, query: dict[str, str], byte_range: str | None) -> Answer:
        """What the worker says. Raises DroppedError, or anything for what the real one has no answer to."""
        with self._lock:
            key = f"{path} {sorted(query.items())} {byte_range}"
            attempt = self.requests[key]
            self.requests[key] += 1
        match path.strip("/").split("/"):
            case ["v1", "file", file_id, "page", number]:
                answer = Answer(200, self._page(file_id, int(number), query), attempt)
            case ["v1", "load"]:
                answer = Answer(200, self._load(query), attempt)
            case names:
                answer = self._s3("/".join(names), byte_range, attempt)
        if self.fault is not None:
            self.fault(answer)
        return answer

    def _page(self, file_id: str, number: int, query: dict[str, str]) -> bytes:
        paths = (path for path in self.root.rglob("*") if path.is_file())
        path = next(path for path in paths if hashlib.sha256(f"file://{path}".encode()).hexdigest() == file_id)
        name = str(path.relative_to(self.root))
        if self.evicted & {(name, number), (name, None)}:
            raise DroppedError
        page = path.read_bytes()[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        offset = int(query.get("offset", 0))
        return page[offset : offset + int(query.get("length", PAGE_BYTES))]

    def _load(self, query: dict[str, str]) -> bytes:
        path = query["path"].replace("%2F", "/").replace("%3A", ":").removeprefix(f"file://{self.root}/")
        if query["opType"] == "submit":
            self.evicted = {(name, page) for name, page in self.evicted if name != path}
            return json.dumps({"success": True, "jobId": "1", "path": path, "message": ""}).encode()
        return json.dumps({"jobState": "SUCCEEDED", "path": path, "message": ""}).encode()

    def _s3(self, name: str, byte_range: str | None, attempt: int) -> Answer:
        path = self.root / name
        if not path.is_file():
            return Answer(404, b"", attempt)
        content = path.read_bytes()
        if byte_range is None:
            return Answer(200, content, attempt)
        first, _, last = byte_range.removeprefix("bytes=").partition("-")
        return Answer(206, content[int(first) : int(last) + 1 if last else None], attempt)

    def _handler(worker: "Worker") -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, _, text = self.path.partition("?")
                query = dict(pair.split("=", 1) for pair in text.split("&") if pair)
                try:
                    answer = worker.answer(path, query, self.headers.get("Range"))
                except Exception:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Length", str(answer.announced))
                self.end_headers()
                self._send_body(answer)
                self.close_connection = len(answer.body) != answer.announced

            def _send_body(self, answer: Answer) -> None:
                if answer.bytes_per_second is None:
                    self.wfile.write(answer.body)
                    return
                for start in range(0, len(answer.body), 256):
                    try:
                        self.wfile.write(answer.body[start : start + 256])
                    except OSError:  # the client has had enough
                        return
                    time.sleep(256 / answer.bytes_per_second)

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler
