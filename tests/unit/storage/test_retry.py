import errno

import pytest

from tests.unit.storage.doors import CONTENT, ScriptedDoor, batched, failing, part
from ttv_train.errors import UserError
from ttv_train.storage.base import refused_write
from ttv_train.storage.breaker import COOLDOWN_SECONDS, FAILURES, CircuitBreaker
from ttv_train.storage.failures import (
    CircuitOpenError,
    DamagedReadError,
    HttpStatusError,
    StoreUnavailableError,
    is_transient,
    kind_of,
)
from ttv_train.storage.integrity import VerifiedReads
from ttv_train.storage.retry import DAMAGED_ATTEMPTS, RetriedReads


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def retried(door, clock, *, deadline=60.0, fail_fast=False):
    return RetriedReads(
        VerifiedReads(batched(door)),
        deadline_seconds=deadline,
        breaker=CircuitBreaker(clock),
        fail_fast=fail_fast,
        sleep=clock.sleep,
        clock=clock,
    )


def test_a_burst_of_errors_is_sat_out():
    clock = Clock()
    errors = [HttpStatusError(503, "u"), ConnectionResetError(), TimeoutError(), HttpStatusError(500, "u")]
    door = ScriptedDoor(faults=[failing(error) for error in errors])
    assert retried(door, clock).read_range(part(0, 8)) == CONTENT[:8]
    assert len(door.reads) == 5
    assert 0 < clock.now < 60


def test_only_what_failed_is_read_again():
    door = ScriptedDoor({"a": CONTENT, "b": CONTENT}, faults=[failing(HttpStatusError(503, "u"))])
    wanted = [part(0, 8, "a"), part(0, 8, "b")]
    assert retried(door, Clock()).read_many(wanted) == [CONTENT[:8]] * 2
    assert len(door.reads) == 3


def test_after_the_deadline_the_store_is_unavailable():
    clock = Clock()
    door = ScriptedDoor(faults=[failing(ConnectionRefusedError("down"))] * 1000)
    with pytest.raises(StoreUnavailableError, match="scripted://host cannot be read"):
        retried(door, clock).read("a")
    assert 40 < clock.now <= 60


def test_a_store_that_is_down_for_a_minute_is_waited_for():
    clock = Clock()

    def down(content: bytes) -> bytes:
        if clock.now < 60:
            raise ConnectionRefusedError("down")
        return content

    door = ScriptedDoor(faults=[down] * 1000)
    assert retried(door, clock, deadline=300).read_range(part(0, 8)) == CONTENT[:8]


@pytest.mark.parametrize("error", [FileNotFoundError("a"), PermissionError("a"), HttpStatusError(400, "u")])
def test_what_will_not_change_is_not_tried_again(error):
    door = ScriptedDoor(faults=[failing(error)])
    with pytest.raises(type(error)):
        retried(door, Clock()).read("a")
    assert len(door.reads) == 1


def test_garbled_bytes_are_read_again_and_stale_ones_given_up():
    door = ScriptedDoor(faults=[bytes.upper, lambda content: content[::-1]])
    assert retried(door, Clock()).read_range(part(97, 8)) == CONTENT[97:105]
    door.faults = [bytes.upper] * 1000
    clock = Clock()
    with pytest.raises(DamagedReadError):
        retried(door, clock).read_range(part(97, 8))
    assert (len(door.reads), clock.now < 2) == (3 + DAMAGED_ATTEMPTS, True)


def test_an_open_circuit_fails_at_once_where_there_is_a_fallback():
    clock = Clock()
    door = ScriptedDoor(faults=[failing(ConnectionRefusedError())] * FAILURES)
    store = retried(door, clock, deadline=1000, fail_fast=True)
    with pytest.raises(StoreUnavailableError):
        store.read("a")
    assert len(door.reads) == FAILURES
    stopped_at = clock.now
    with pytest.raises(StoreUnavailableError):
        store.read("a")
    assert (len(door.reads), clock.now) == (FAILURES, stopped_at)
    clock.now += COOLDOWN_SECONDS
    assert store.read("a") == CONTENT


def test_a_host_that_stays_down_is_probed_once_per_cooldown():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(FAILURES):
        assert breaker.allows()
        breaker.record(False)
    assert not breaker.allows()
    clock.now = COOLDOWN_SECONDS
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.record(True)
    assert breaker.allows()


def test_a_write_is_tried_again_unless_there_is_no_space(monkeypatch):
    door, clock = ScriptedDoor(), Clock()
    store = retried(door, clock)
    causes = [HttpStatusError(503, "u"), ConnectionResetError()]

    def put(name: str, data: bytes) -> None:
        if causes:
            cause = causes.pop(0)
            raise refused_write(door.url, name, cause) from cause
        door.objects[name] = data

    monkeypatch.setattr(store.inner, "put", put)
    store.put("b", b"content")
    assert door.objects["b"] == b"content"
    causes += [OSError(errno.ENOSPC, "No space left on device"), OSError("never reached")]
    with pytest.raises(UserError, match="No space left"):
        store.put("b", b"content")
    assert len(causes) == 1


def test_kinds_of_errors():
    kinds = {
        kind_of(error) for error in (HttpStatusError(503, "u"), CircuitOpenError(), ConnectionResetError(), OSError())
    }
    assert kinds == {"http_503", "circuit_open", "connection", "io"}
    assert is_transient(HttpStatusError(429, "u"))
    assert not is_transient(HttpStatusError(413, "u"))
