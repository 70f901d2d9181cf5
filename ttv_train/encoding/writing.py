"""Shards written on a thread of their own while the device encodes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.shards import LatentSample, put_shard
from ttv_train.data.units import UnitRecord, WorkUnit, put_record
from ttv_train.storage import Store

MAX_SHARDS_HELD = 2
"""Shards in memory besides the one that is being filled."""


class ShardWriter:
    """Writes finished units: shard, then record. At the end of the context everything is written.

    Args:
        store: the store.
        on_written: called with every unit that is written, from the writer's thread.
    """

    def __init__(self, store: Store, on_written: Callable[[WorkUnit], None]) -> None:
        self._store, self._on_written = store, on_written
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._room = threading.Semaphore(MAX_SHARDS_HELD)
        self._writing: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if kind is None:
            self._raise_failure()

    def write(self, unit: WorkUnit, samples: Sequence[LatentSample], rejected: list[QuarantineRow]) -> None:
        """Hands a unit over; waits while too many are waiting.

        Raises:
            UserError: an earlier unit cannot be written.
        """
        self._room.acquire()
        self._raise_failure()
        self._writing = [future for future in self._writing if not future.done()]
        self._writing.append(self._pool.submit(self._write, unit, samples, rejected))

    def _write(self, unit: WorkUnit, samples: Sequence[LatentSample], rejected: list[QuarantineRow]) -> None:
        try:
            shard, entries = put_shard(self._store, samples) if samples else (None, [])
            put_record(self._store, unit, UnitRecord(shard, entries, rejected))
            self._on_written(unit)
        finally:
            self._room.release()

    def _raise_failure(self) -> None:
        for future in self._writing:
            if future.done():
                future.result()
