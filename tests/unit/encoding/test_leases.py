import os
import threading
from dataclasses import replace

import pytest

from ttv_train.encoding.leases import Holder, Leases, LeaseState
from ttv_train.storage import open_store


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def holder_of(worker, unit):
    state = worker.leases.state_of(unit)
    return state and state.holder


class Worker:
    """A worker on another machine, whose death nobody sees, with a clock that runs on demand."""

    def __init__(self, store, lease_seconds=60.0):
        self.clock = Clock()
        self.leases = Leases(store, "leases", lease_seconds, self.clock)
        self.leases.holder = replace(self.leases.holder, boot="")


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}")


def test_one_worker_gets_a_lease(store):
    first, second = Worker(store), Worker(store)
    assert first.leases.claim("a")
    assert not second.leases.claim("a")
    assert second.leases.claim("b")
    assert holder_of(second, "a") == first.leases.holder


def test_of_many_workers_that_reach_for_a_lease_at_once_one_gets_it(store):
    workers = [Worker(store) for _ in range(8)]
    for unit in map(str, range(10)):
        start, wins = threading.Barrier(len(workers)), []

        def reach(worker, unit=unit, start=start, wins=wins):
            start.wait()
            wins.append(worker.leases.claim(unit))

        threads = [threading.Thread(target=reach, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(wins) == 1


def test_a_lease_without_a_sign_of_life_expires_on_the_clock_of_who_watches(store):
    dead, watcher, late = Worker(store), Worker(store), Worker(store)
    dead.leases.claim("a")
    assert not watcher.leases.claim("a")
    watcher.clock.now = 59
    assert not watcher.leases.claim("a")
    late.clock.now = 1000  # it sees the lease for the first time
    assert not late.leases.claim("a")
    watcher.clock.now = 60
    assert watcher.leases.claim("a")
    late.clock.now = 1059  # in new hands since
    assert not late.leases.claim("a")


def test_a_sign_of_life_renews_a_lease(tmp_path):
    store = open_store(str(tmp_path))
    watcher = Worker(store, lease_seconds=0.03)
    with Leases(store, "leases", 0.03) as alive:
        alive.claim("a")
        before = watcher.leases._newest("a")
        for _ in range(200):
            if watcher.leases._newest("a") != before:
                break
            threading.Event().wait(0.01)
        watcher.clock.now = 0.02
        watcher.leases._newest("a")
        assert watcher.leases._newest("a") != before
        assert watcher.leases.seconds_watched("a") == 0.02
    assert watcher.leases.claim("a")  # released at the end


def test_a_process_of_this_machine_that_died_loses_its_leases_at_once(tmp_path):
    store = open_store(str(tmp_path))
    worker = Worker(store)
    child = os.fork()
    if child == 0:
        Leases(store, "leases", 1e6).claim("a")
        os._exit(0)
    os.waitpid(child, 0)
    assert LeaseState.from_json(store.read("leases/a-0.json")).holder.pid == child
    assert holder_of(worker, "a") is None
    assert worker.leases.claim("a")


def test_a_straggler_may_be_overtaken_once(store):
    slow, idle, other = Worker(store), Worker(store), Worker(store)
    slow.leases.claim("a")
    assert not idle.leases.claim("a")
    idle.clock.now = 5
    assert idle.leases.seconds_watched("a") == 5
    assert idle.leases.claim("a", even_if_held=True)
    assert holder_of(other, "a") == idle.leases.holder
    slow.leases.drop("a")
    assert holder_of(other, "a") is None or holder_of(other, "a") == idle.leases.holder


def test_a_lease_that_is_done_leaves_nothing(tmp_path):
    worker = Worker(open_store(str(tmp_path)))
    worker.leases.claim("a")
    worker.leases.drop("a")
    worker.leases.drop("never held")
    assert not list((tmp_path / "leases").iterdir())


def test_a_half_written_lease_expires(tmp_path):
    store = open_store(str(tmp_path))
    store.put("leases/a-0.json", b'{"holder": {"ho')
    worker = Worker(store)
    assert holder_of(worker, "a") is None
    assert not worker.leases.claim("a")
    worker.clock.now = 60
    assert worker.leases.claim("a")


def test_a_store_that_lets_the_last_writer_win_gives_the_lease_to_it(tmp_path):
    """As Alluxio's S3 API does between two writers that look at the same moment."""
    store = open_store(str(tmp_path))
    first, second = Worker(store), Worker(store)

    def put_both(name, data):
        store.put(name, data)
        store.put(name, LeaseState(second.leases.holder, 0).to_json())
        return True

    first.leases._store = type("Store", (), {"read": store.read, "put_if_absent": staticmethod(put_both)})()
    assert not first.leases.claim("a")
    assert holder_of(second, "a") == second.leases.holder


def test_holders_of_one_process_are_different():
    assert Holder.this_process() != Holder.this_process()
    assert not Holder.this_process().is_known_dead
    assert replace(Holder.this_process(), started="1").is_known_dead
