"""Streams the micro-batches of one data-parallel rank, prefetched on a thread."""

import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from ttv_train.data.collate import Batch, Collator
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.order import DataOrder, GlobalBatch
from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentSample
from ttv_train.errors import UserError

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
    """

    store: LatentDataset
    entries: Sequence[LatentEntry]
    order: DataOrder
    collator: Collator
    data_rank: int
    data_degree: int
    micro_batch_size: int
    on_bad_sample: Callable[[LatentEntry, str], None]
    bad_keys: set[str] = field(default_factory=set)
    """Of the samples that this rank could not read."""

    def steps(self, start: int, stop: int) -> Generator[list[Batch], None, None]:
        """The micro-batches of optimizer steps `start` to `stop - 1`."""
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
            try:
                for step in range(start, stop):
                    if not put(self._load(step)):
                        return
            except BaseException as error:
                put(error)

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

    def _load(self, step: int) -> list[Batch]:
        batch = self.order.batch(step)
        count = len(batch.indices) // self.data_degree
        slots = range(self.data_rank * count, (self.data_rank + 1) * count)
        samples = [self._read(batch, slot) for slot in slots]
        return [
            self.collator(samples[i : i + self.micro_batch_size], step, slots[i : i + self.micro_batch_size])
            for i in range(0, count, self.micro_batch_size)
        ]

    def _read(self, batch: GlobalBatch, slot: int) -> LatentSample:
        index, attempt = batch.indices[slot], 0
        while True:
            entry = self.entries[index]
            if entry.key not in self.bad_keys:
                try:
                    return self.store.read(entry)
                except CorruptSampleError as error:
                    self._report(entry, str(error))
            if attempt == self.order.num_members(batch.bucket):
                raise UserError(
                    f"latents.path {self.store.path}: not one sample of bucket {'x'.join(map(str, batch.bucket))} can "
                    f"be read; remove {entry.shard} and run `ttv-train encode` again"
                )
            index, attempt = self.order.replacement(batch, slot, attempt), attempt + 1

    def _report(self, entry: LatentEntry, reason: str) -> None:
        self.bad_keys.add(entry.key)
        self.on_bad_sample(entry, reason)
        logger.warning("%s; the sample is replaced", reason)
