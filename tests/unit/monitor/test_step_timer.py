from types import SimpleNamespace

import pytest

from ttv_train.monitor import step_timer
from ttv_train.monitor.step_timer import PHASES, StepTimer


class FakeBackend:
    """A device whose queue runs only when it is waited for."""

    def __init__(self, clock):
        self.clock, self.queued = clock, 0.0

    def synchronize(self):
        self.clock.now += self.queued
        self.queued = 0.0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0, exchanged=0.0)
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(
        step_timer.collectives,
        "snapshot",
        lambda: {"attention": {"calls": 1, "bytes": 8, "seconds": clock.exchanged}, "join": {"seconds": 0.0}},
    )
    return clock


def test_phases_add_up_over_micro_batches_and_start_again_with_the_step(clock):
    timer = StepTimer(FakeBackend(clock))
    for _ in range(2):
        with timer.phase("forward"):
            clock.now += 1.5
        with timer.phase("backward"):
            clock.now += 3.0
    clock.now += 50.0  # between phases: nobody's time
    with timer.phase("optimizer"):
        clock.now += 0.25
    assert timer.end_step() == {
        "data": 0.0,
        "forward": 3.0,
        "backward": 6.0,
        "communication": 0.0,
        "optimizer": 0.25,
    }
    assert timer.end_step() == dict.fromkeys(PHASES, 0.0)


def test_a_phase_includes_what_it_queued_and_nothing_else(clock):
    backend = FakeBackend(clock)
    timer = StepTimer(backend)
    backend.queued = 7.0
    with timer.phase("forward"):
        backend.queued = 2.0
    with timer.phase("backward"):
        clock.now += 1.0
    seconds = timer.end_step()
    assert (seconds["forward"], seconds["backward"]) == (2.0, 1.0)


def test_exchanges_inside_a_phase_are_communication(clock):
    timer = StepTimer(FakeBackend(clock))
    clock.exchanged = 9.0  # before the phase, for instance by validation
    with timer.phase("forward"):
        clock.now += 3.0
        clock.exchanged += 1.0
    with timer.phase("communication"):
        clock.now += 0.5
        clock.exchanged += 0.25
    seconds = timer.end_step()
    assert (seconds["forward"], seconds["communication"]) == (2.0, 1.5)


def test_a_phase_that_raises_is_counted(clock):
    timer = StepTimer(FakeBackend(clock))
    with pytest.raises(RuntimeError), timer.phase("data"):
        clock.now += 1.0
        raise RuntimeError
    assert timer.end_step()["data"] == 1.0


def test_a_step_that_is_not_timed_does_not_wait_for_the_device(clock):
    backend = FakeBackend(clock)
    timer = StepTimer(backend)
    timer.enabled = False
    with timer.phase("forward"):
        backend.queued = 2.0
    assert backend.queued == 2.0
    assert timer.end_step() == dict.fromkeys(PHASES, 0.0)
