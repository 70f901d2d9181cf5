"""A slow object store on loopback: ranged GETs as S3 answers them, each with a latency, all with one bandwidth.

    python tools/bench/throttled_store.py FOLDER [LATENCY_MS [MB_PER_SECOND]]

Prints its port. Paths are /BUCKET/KEY; buckets are the folders in FOLDER. There are no credentials and no writes.
"""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK_BYTES = 64 * 1024


class Link:
    """Hands out the right to send, so that all connections together stay below a bandwidth."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Returns when `num_bytes` have gone through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_second
            pause = self._free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)


def make_server(folder: Path, latency_seconds: float, bytes_per_second: float) -> ThreadingHTTPServer:
    """A server on a free port of 127.0.0.1; the caller runs it."""
    link = Link(bytes_per_second)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            time.sleep(latency_seconds)
            path = folder / self.path.partition("?")[0].lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            first, last, status = 0, size - 1, 200
            if (wanted := self.headers.get("Range")) is not None:
                start, _, end = wanted.removeprefix("bytes=").partition("-")
                first, last, status = int(start), min(size - 1, int(end) if end else size - 1), 206
            self.send_response(status)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", f'"{size:032x}"')
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            if with_body:
                self._send(path, first, last - first + 1)

        def _send(self, path: Path, offset: int, length: int) -> None:
            with path.open("rb") as file:
                file.seek(offset)
                while length:
                    chunk = file.read(min(CHUNK_BYTES, length))
                    link.wait(len(chunk))
                    self.wfile.write(chunk)
                    length -= len(chunk)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    latency_ms, megabytes = (float(value) for value in (*sys.argv[2:], *("50", "50")[len(sys.argv) - 2 :]))
    store = make_server(Path(sys.argv[1]), latency_ms / 1000, megabytes * 1e6)
    print(store.server_address[1], flush=True)
    store.serve_forever()
