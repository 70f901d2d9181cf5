"""Where the time of an optimizer step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ttv_train.devices.base import DeviceBackend
from ttv_train.parallel import collectives

PHASES = ("data", "forward", "backward", "communication", "optimizer")
"""In the order of a step: waiting for the batch, computing, exchanging between ranks, updating."""


class StepTimer:
    """Accumulates wall-clock seconds by phase.

    Sequence-parallel exchanges happen inside forward and backward. What `parallel.collectives` has counted meanwhile is
    taken off the enclosing phase and reported as `communication`, so that the phases add up to the time they took.
    The device is waited for at both ends of a phase: a phase includes what it has queued, and nothing else. That keeps
    the host from running ahead of the device, so a step whose record nobody keeps is not to be timed.
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.enabled = True
        """Whether phases are timed."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to the phase `name`, one of `PHASES`. Phases do not nest."""
        assert name in PHASES, name
        if not self.enabled:
            yield
            return
        self._backend.synchronize()
        communication, start = _communication_seconds(), time.perf_counter()
        try:
            yield
        finally:
            self._backend.synchronize()
            elapsed = time.perf_counter() - start
            exchanged = _communication_seconds() - communication
            self._seconds[name] += elapsed - exchanged
            self._seconds["communication"] += exchanged

    def end_step(self) -> dict[str, float]:
        """Seconds by phase since the last call, every phase present; starts the next step at zero."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


def _communication_seconds() -> float:
    return sum(traffic["seconds"] for traffic in collectives.snapshot().values())
