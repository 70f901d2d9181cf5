"""What a worker takes when nothing is free any more."""

from dataclasses import replace

import pytest

from tests.encode_parts import make_clip
from ttv_train.data.units import WorkUnit
from ttv_train.encoding import claims
from ttv_train.encoding.claims import STRAGGLER_FACTOR, Claims
from ttv_train.encoding.leases import Leases
from ttv_train.storage import open_store


class Clock:
    """Time that passes only in sleep."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(claims, "time", clock)
    return clock


def test_what_a_straggler_is_at_is_taken_after_a_few_times_the_own_slowest(tmp_path, clock):
    store = open_store(str(tmp_path))
    quick, slow, held = (WorkUnit(((key, make_clip(0)),)) for key in ("quick", "slow", "held"))
    straggler, leases = (Leases(store, "leases", 1e6, clock.monotonic) for _ in range(2))
    straggler.claim(held.name)
    mine = Claims(store, [quick, slow, held], leases, stop=lambda: False, on_done=lambda unit: None)
    taken = []
    for unit in mine:
        taken.append(unit)
        clock.now += {quick: 2.0, slow: 5.0, held: 0.0}[unit]
        mine.note_encoded(unit)
    assert set(taken[:2]) == {quick, slow}
    assert taken[2:] == [held]
    assert clock.now > STRAGGLER_FACTOR * 5.0


def test_the_longest_units_are_taken_first(tmp_path):
    store = open_store(str(tmp_path))
    buckets = {"short": (1, 16, 16), "long": (17, 16, 16), "wide": (1, 16, 64)}
    units = [WorkUnit(((key, replace(make_clip(0), bucket=bucket)),)) for key, bucket in buckets.items()]
    leases = Leases(store, "leases", 1e6)
    claimed = Claims(store, units, leases, stop=lambda: False, on_done=lambda unit: None)
    assert [unit.clips[0][0] for unit in claimed] == ["long", "wide", "short"]
