"""Which unit a worker takes next: what nobody has, then what has been given up, at last what a straggler is at."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

from ttv_train.data.units import WorkUnit, read_record
from ttv_train.encoding.leases import Leases
from ttv_train.storage import Store

POLL_SECONDS = 1.0
STRAGGLER_FACTOR = 3.0
"""A unit that takes another worker so many times as long as this worker's slowest may be encoded a second time."""


class Claims:
    """The units of a plan that this worker gets to encode.

    Args:
        store: where finished units leave their records.
        units: those that were not finished when the plan was made.
        leases: of these units.
        stop: whether the worker is to take no further unit.
        on_done: called with every unit that another worker has finished.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[WorkUnit],
        leases: Leases,
        stop: Callable[[], bool],
        on_done: Callable[[WorkUnit], None],
    ) -> None:
        self._store, self._leases, self._stop, self._on_done = store, leases, stop, on_done
        self._claimed_at: dict[str, float] = {}
        self._slowest_seconds: float | None = None
        # The longest units come first, so that workers finish together. Among equals each starts at another place, so
        # that they seldom reach for the same one.
        start = int(hashlib.sha256(leases.holder.token.encode()).hexdigest(), 16) % len(units) if units else 0
        self._waiting = sorted([*units[start:], *units[:start]], key=lambda unit: unit.num_pixels, reverse=True)

    def note_encoded(self, unit: WorkUnit) -> None:
        """Notes how long this worker has had a unit, which is longer than encoding it where units are decoded ahead."""
        seconds = time.monotonic() - self._claimed_at.pop(unit.name)
        self._slowest_seconds = max(self._slowest_seconds or 0.0, seconds)

    def __iter__(self) -> Iterator[WorkUnit]:
        """Claimed units. Ends when every unit is finished or in this worker's hands, or when the worker is to stop."""
        while self._waiting and not self._stop():
            claimed = False
            for unit in list(self._waiting):
                if self._stop():
                    return
                if self._take(unit, even_if_held=False):
                    claimed = True
                    yield unit
            if self._waiting and not claimed:
                straggler = max(self._waiting, key=lambda unit: self._leases.seconds_watched(unit.name))
                if self._is_straggling(straggler) and self._take(straggler, even_if_held=True):
                    yield straggler
                else:
                    time.sleep(POLL_SECONDS)

    def _take(self, unit: WorkUnit, *, even_if_held: bool) -> bool:
        """Whether the unit is this worker's now. One that is finished is no longer waited for."""
        if read_record(self._store, unit) is None:
            if not self._leases.claim(unit.name, even_if_held=even_if_held):
                return False
            # It may have been finished between the look at its record and the claim.
            if read_record(self._store, unit) is None:
                self._waiting.remove(unit)
                self._claimed_at[unit.name] = time.monotonic()
                return True
            self._leases.drop(unit.name)
        self._waiting.remove(unit)
        self._on_done(unit)
        return False

    def _is_straggling(self, unit: WorkUnit) -> bool:
        if self._slowest_seconds is None:
            return False
        return self._leases.seconds_watched(unit.name) > STRAGGLER_FACTOR * self._slowest_seconds
