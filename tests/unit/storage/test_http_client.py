import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ttv_train.config import StorageConfig
from ttv_train.storage import open_store
from ttv_train.storage.failures import DamagedReadError, HttpStatusError
from ttv_train.storage.http_client import HttpClient

CONTENT = bytes(range(200))


class Handler(BaseHTTPRequestHandler):
    """/ranges knows ranges, /whole does not, /moved redirects to it, /long sends too much, /NUMBER is a status."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        if self.path == "/moved":
            self._send(307, b"", Location="/ranges")
        elif self.path == "/whole" or (wanted is None and not self.path[1:].isdigit()):
            self._send(200, CONTENT)
        elif self.path[1:].isdigit():
            self._send(int(self.path[1:]), b"reason")
        else:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            body = CONTENT[int(first) : int(last) + 1 if last else None]
            if self.path == "/long":
                body += b"x"
            self._send(206 if body else 416, body)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["ranges", "whole", "moved"])
def test_ranges_are_what_was_asked_for(url, path):
    client = HttpClient(5)
    assert client.get(f"{url}/{path}", 10, 5) == CONTENT[10:15]
    assert client.get(f"{url}/{path}", 190, 50) == CONTENT[190:]
    assert client.get(f"{url}/{path}", 190) == CONTENT[190:]
    assert client.get(f"{url}/{path}") == CONTENT
    assert client.get(f"{url}/{path}", 200, 5) == b""


def test_more_than_was_asked_for_is_an_error(url):
    with pytest.raises(DamagedReadError, match="6 bytes came of 5"):
        HttpClient(5).get(f"{url}/long", 0, 5)


@pytest.mark.parametrize(
    ("status", "error"),
    [(404, FileNotFoundError), (403, PermissionError), (401, PermissionError), (503, HttpStatusError)],
)
def test_error_statuses(url, status, error):
    with pytest.raises(error):
        HttpClient(5).get(f"{url}/{status}", 0, 5)


def test_a_host_that_is_allowed_is_a_store(url):
    store = open_store(url, StorageConfig(http_hosts=["127.0.0.1"]))
    assert store.read("ranges", 3, 4) == CONTENT[3:7]
    with pytest.raises(FileNotFoundError):
        store.read("404")
