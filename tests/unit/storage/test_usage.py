import http.server
import json
import threading

import pytest

from ttv_train.storage.counters import StorageCounters, difference
from ttv_train.storage.usage import WorkerMetrics, usage


def test_usage_adds_up_the_ranks():
    ranks = [StorageCounters(), StorageCounters()]
    ranks[0].add_read("alluxio", 600, 0.5)
    ranks[1].add_read("alluxio", 200, 0.25)
    ranks[1].add_read("under_store", 200)
    ranks[1].add_error("short")
    ranks[1].add("fallbacks")
    ranks[0].add_wait(2.0)
    summary = usage([rank.snapshot() for rank in ranks], alluxio_miss_bytes=300)
    assert (summary["alluxio_bytes"], summary["under_store_bytes"], summary["hit_rate"]) == (800, 200, 0.5)
    assert (summary["fallbacks"], summary["errors"]) == (1, {"short": 1})
    assert (summary["wait_seconds"], summary["read_seconds"]) == (2.0, 0.75)


def test_without_a_cache_there_is_no_hit_rate():
    rank = StorageCounters()
    rank.add_read("disk", 10)
    assert usage([rank.snapshot()], None)["hit_rate"] is None


def test_differences_leave_out_what_was_before():
    rank = StorageCounters()
    rank.add_read("disk", 10, 1.0)
    before = rank.snapshot()
    rank.add_read("disk", 5)
    rank.add_error("short")
    change = difference(rank.snapshot(), before)
    assert (change["bytes"], change["errors"], change["reads"]) == ({"disk": 5}, {"short": 1}, 1)


@pytest.fixture
def metrics_page():
    """A worker's metrics page; the test sets how many bytes it has read from the under-store."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = "Worker.BytesReadPerUfs.UFS:%2Fufs.User:"
            body = json.dumps({"counters": {name: {"count": server.count}, "other": {"count": 1}}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.count = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_misses_are_counted_across_a_restart_of_the_worker(metrics_page):
    metrics_page.count = 100
    metrics = WorkerMetrics([f"http://127.0.0.1:{metrics_page.server_port}/"])
    metrics_page.count = 150
    assert metrics.under_store_bytes() == 50
    metrics_page.count = 7
    assert metrics.under_store_bytes() == 57


def test_a_worker_that_does_not_say_leaves_the_misses_unknown():
    assert WorkerMetrics([]).under_store_bytes() is None
    assert WorkerMetrics(["http://127.0.0.1:9/"]).under_store_bytes() is None
