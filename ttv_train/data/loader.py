"""Streams the micro-batches of one data-parallel rank, prefetched on threads."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from ttv_train.data.collate import Batch, Collator
from ttv_train.data.dataset import LatentDataset, SampleResult
from ttv_train.data.order import DataOrder, GlobalBatch
from ttv_train.data.read_ahead import read_ahead
from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentSample
from ttv_train.errors import UserError
from ttv_train.storage.counters import counters

logger = logging.getLogger(__name__)

PREFETCHED_STEPS = 2


@dataclass
class LatentLoader:
    """Iterates over steps; each item is the list of this rank's micro-batches of that step.

    Every rank of one sequence-parallel group passes the same `data_rank` and gets the same batches. A sample that
    fails its checksum is reported once and replaced by another of its bucket, chosen by its place in the order alone.

    Args:
        store: the latent store.
        entries: the samples of the training set, those that `order` was built from.
        order: the global batches.
        collator: makes the tensors.
        data_rank, data_degree: this rank's place on the data axis; the global batch is dealt in contiguous parts.
        micro_batch_size: samples per micro-batch, at most.
        on_bad_sample: called once per corrupt sample with its entry and the reason.
        workers: threads that read ahead; with 0 everything is done when the batch is asked for, by who asks.
        prefetch_bytes: of stored samples that are read ahead, at most.
    """

    store: LatentDataset
    entries: Sequence[LatentEntry]
    order: DataOrder
    collator: Collator
    data_rank: int
    data_degree: int
    micro_batch_size: int
    on_bad_sample: Callable[[LatentEntry, str], None]
    workers: int = 4
    prefetch_bytes: int = 2**30
    bad_keys: set[str] = field(default_factory=set)
    """Of the samples that this rank could not read."""

    def steps(self, start: int, stop: int) -> Generator[list[Batch], None, None]:
        """The micro-batches of optimizer steps `start` to `stop - 1`."""
        batches = self._batches(start, stop) if self.workers == 0 else self._prefetched(start, stop)
        try:
            for _ in range(start, stop):
                started = time.perf_counter()
                step_batches = next(batches)
                counters.add_wait(time.perf_counter() - started)
                yield step_batches
        finally:
            batches.close()

    def _prefetched(self, start: int, stop: int) -> Generator[list[Batch], None, None]:
        """`_batches`, made on a thread of their own."""
        ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=PREFETCHED_STEPS)
        closed = threading.Event()

        def put(item: list[Batch] | BaseException) -> bool:
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def prefetch() -> None:
            batches = self._batches(start, stop)
            try:
                for step_batches in batches:
                    if not put(step_batches):
                        return
            except BaseException as error:
                put(error)
            finally:
                batches.close()

        thread = threading.Thread(target=prefetch, name="latent-loader", daemon=True)
        thread.start()
        try:
            for _ in range(start, stop):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()

    def _batches(self, start: int, stop: int) -> Generator[list[Batch], None, None]:
        samples = read_ahead(
            self.store, map(self._entries, range(start, stop)), workers=self.workers, max_bytes=self.prefetch_bytes
        )
        try:
            for step, results in enumerate(samples, start):
                yield self._load(step, results)
        finally:
            samples.close()

    def _entries(self, step: int) -> list[LatentEntry]:
        batch = self.order.batch(step)
        return [self.entries[batch.indices[slot]] for slot in self._slots(batch)]

    def _slots(self, batch: GlobalBatch) -> range:
        """This rank's part of the global batch."""
        count = len(batch.indices) // self.data_degree
        return range(self.data_rank * count, (self.data_rank + 1) * count)

    def _load(self, step: int, results: Sequence[SampleResult]) -> list[Batch]:
        batch = self.order.batch(step)
        slots = self._slots(batch)
        samples = [self._sample(batch, slot, result) for slot, result in zip(slots, results, strict=True)]
        return [
            self.collator(samples[i : i + self.micro_batch_size], step, slots[i : i + self.micro_batch_size])
            for i in range(0, len(slots), self.micro_batch_size)
        ]

    def _sample(self, batch: GlobalBatch, slot: int, result: SampleResult) -> LatentSample:
        """What was read for a slot, or what replaces it."""
        entry, attempt = self.entries[batch.indices[slot]], 0
        while isinstance(result, CorruptSampleError):
            if entry.key not in self.bad_keys:
                self._report(entry, str(result))
            if attempt == self.order.num_members(batch.bucket):
                raise UserError(
                    f"latents.path {self.store.path}: not one sample of bucket {'x'.join(map(str, batch.bucket))} can "
                    f"be read; remove {entry.shard} and run `ttv-train encode` again"
                )
            entry, attempt = self.entries[self.order.replacement(batch, slot, attempt)], attempt + 1
            if entry.key not in self.bad_keys:
                (result,) = self.store.read_many([entry])
        return result

    def _report(self, entry: LatentEntry, reason: str) -> None:
        self.bad_keys.add(entry.key)
        self.on_bad_sample(entry, reason)
        logger.warning("%s; the sample is replaced", reason)
