"""Leases: which worker is at which unit of work. Workers share nothing but the store.

The lease of a unit is an object per holder, `UNIT-0.json`, `UNIT-1.json` and so on; the highest number is in force. Who
takes a unit creates the next one, which a store with conditional creates (local disks, S3 with ``If-None-Match``)
grants to one worker. Elsewhere the holder reads back what it wrote, and the last writer has it.

A holder rewrites its object every third of `lease_seconds`. A lease has expired when another worker has seen it
unchanged for `lease_seconds` on its own clock; no two clocks are ever compared. The lease of a process of this machine
that has died is free at once.

Leases save work and guarantee nothing: what workers write is named by its content, so a unit that two of them encode,
after a pause or on a store without conditional creates, comes to the same objects.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ttv_train.errors import UserError
from ttv_train.storage import Store

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 3


@dataclass(frozen=True)
class Holder:
    """A process that holds leases."""

    host: str
    boot: str
    """Boot of the machine and namespace of its process ids: where `pid` means something."""
    pid: int
    started: str
    """When the process started, in ticks since the boot: process ids are used again."""
    token: str

    @classmethod
    def this_process(cls) -> Self:
        """A holder of its own; two of one process are different."""
        return cls(socket.gethostname(), _boot(), os.getpid(), _start_of(os.getpid()), secrets.token_hex(8))

    @property
    def is_known_dead(self) -> bool:
        """Whether it ran on this machine and is gone."""
        return bool(self.boot) and self.boot == _boot() and _start_of(self.pid) != self.started


@dataclass(frozen=True)
class LeaseState:
    """What the object of a lease says."""

    holder: Holder
    beat: int
    """Rises with every sign of life."""
    is_released: bool = False
    clips_per_second: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "LeaseState | None":
        """None for what is no lease, such as the half-written object of a killed worker."""
        try:
            fields = json.loads(content)
            return cls(**fields | {"holder": Holder(**fields["holder"])})
        except (ValueError, TypeError, KeyError):
            return None


class Leases:
    """The leases that this worker holds and sees under `folder` of a store. As a context it keeps the held ones alive
    and releases them at the end.

    Args:
        store: that all workers share.
        folder: object name prefix of the leases.
        lease_seconds: how long a worker may show no sign of life.
        clock: seconds, of this process alone.

    Attributes:
        holder: this worker.
        clips_per_second: how fast it is; told with every sign of life.
    """

    def __init__(
        self, store: Store, folder: str, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._folder = store, folder
        self._lease_seconds, self._clock = lease_seconds, clock
        self.holder = Holder.this_process()
        self.clips_per_second = 0.0
        self._held: dict[str, tuple[int, LeaseState]] = {}
        self._seen: dict[str, tuple[int, bytes, float, float]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self.release_all()

    def claim(self, unit: str, *, even_if_held: bool = False) -> bool:
        """Takes the lease of a unit if it is free: never held, released or expired. Raises OSError if the store fails.

        Args:
            unit: its name, of an object name's characters.
            even_if_held: take it from a worker that is alive, which is then encoding in vain.
        """
        newest = self._newest(unit)
        if newest is not None and not even_if_held and not self._is_free(unit, newest[1]):
            return False
        generation = 0 if newest is None else newest[0] + 1
        state = LeaseState(self.holder, 0)
        name = self._name(unit, generation)
        self._store.put_if_absent(name, state.to_json())
        # Read back: another may have had it first, and a store without conditional creates lets the last writer win.
        found = LeaseState.from_json(self._store.read(name))
        if found is None or found.holder != self.holder:
            return False
        with self._lock:
            self._held[unit] = (generation, state)
        return True

    def seconds_watched(self, unit: str) -> float:
        """How long this worker has seen the lease of a unit in the same hands."""
        return self._clock() - self._seen[unit][3] if unit in self._seen else 0.0

    def drop(self, unit: str) -> None:
        """Removes the lease of a unit that is done."""
        with self._lock:
            held = self._held.pop(unit, None)
        if held is not None:
            self._store.delete(self._name(unit, held[0]))

    def release_all(self) -> None:
        """Gives the leases that are still held to whoever wants them. They expire anyway if the store fails now."""
        with self._lock:
            held, self._held = self._held, {}
            for unit, (generation, state) in held.items():
                self._put(unit, generation, replace(state, is_released=True))

    def state_of(self, unit: str) -> LeaseState | None:
        """The lease of a unit that somebody works on, as far as the store says."""
        newest = self._newest(unit)
        state = None if newest is None else LeaseState.from_json(newest[1])
        return None if state is None or state.is_released or state.holder.is_known_dead else state

    def _newest(self, unit: str) -> tuple[int, bytes] | None:
        """Number and content of the lease in force."""
        found = None
        generation = self._seen[unit][0] if unit in self._seen else 0
        while True:
            try:
                content = self._store.read(self._name(unit, generation))
            except FileNotFoundError:
                return found
            found = generation, content
            now = self._clock()
            seen = self._seen.get(unit)
            if seen is None or seen[0] != generation:
                self._seen[unit] = generation, content, now, now
            elif seen[1] != content:
                self._seen[unit] = generation, content, now, seen[3]
            generation += 1

    def _is_free(self, unit: str, content: bytes) -> bool:
        state = LeaseState.from_json(content)
        if state is not None and (state.is_released or state.holder.is_known_dead):
            return True
        return self._clock() - self._seen[unit][2] >= self._lease_seconds

    def _keep_alive(self) -> None:
        while not self._closing.wait(self._lease_seconds / BEATS_PER_LEASE):
            with self._lock:
                for unit, (generation, state) in self._held.items():
                    beat = replace(state, beat=state.beat + 1, clips_per_second=self.clips_per_second)
                    self._held[unit] = generation, beat
                    self._put(unit, generation, beat)

    def _put(self, unit: str, generation: int, state: LeaseState) -> None:
        try:
            self._store.put(self._name(unit, generation), state.to_json())
        except (OSError, UserError) as error:
            logger.warning("the lease of %s cannot be renewed: %s", unit, error)

    def _name(self, unit: str, generation: int) -> str:
        return f"{self._folder}/{unit}-{generation}.json"


def _boot() -> str:
    """Empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Empty if there is no such process, or only what is left of it."""
    try:
        # The name in parentheses may hold anything; state and start time are the 1st and 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
