import threading

import pytest

from tests.unit.storage.doors import CONTENT, ScriptedDoor
from ttv_train.storage.watchdog import WatchedDoor


def test_a_read_that_hangs_is_left_behind_and_the_next_one_works():
    release = threading.Event()

    def hang(content: bytes) -> bytes:
        release.wait(60)
        return content

    door = WatchedDoor(ScriptedDoor(faults=[hang]), timeout_seconds=0.1, max_abandoned=2)
    with pytest.raises(TimeoutError, match="did not answer in"):
        door.read("a", 0, 4)
    assert door.read("a", 0, 4) == CONTENT[:4]
    release.set()


def test_the_number_of_reads_left_behind_is_bounded():
    release = threading.Event()
    hanging = ScriptedDoor(faults=[lambda content: content if release.wait(60) else b""] * 2)
    door = WatchedDoor(hanging, timeout_seconds=0.05, max_abandoned=2)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="did not answer"):
            door.read("a")
    with pytest.raises(TimeoutError, match="2 calls hang"):
        door.read("a")
    assert len(hanging.reads) == 2
    release.set()
    for thread in threading.enumerate():
        if thread.name == "storage-watched":
            thread.join()
    assert door.read("a") == CONTENT


def test_errors_come_through():
    with pytest.raises(FileNotFoundError):
        WatchedDoor(ScriptedDoor(), timeout_seconds=10, max_abandoned=1).read("b")
