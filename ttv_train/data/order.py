"""The order of the data: a function of (seed, epoch, dataset digest), the same on any number of ranks and workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ttv_train.errors import UserError
from ttv_train.parallel.rng import keyed_permutation

Bucket = tuple[int, int, int]
Tail = Literal["repeat", "drop"]


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step over all ranks. All are of one bucket."""

    step: int
    epoch: int
    bucket: Bucket
    indices: tuple[int, ...]
    """Positions in the list of entries that the order was built from; the bucket's batch size of them."""


@dataclass(frozen=True)
class Stream:
    """The entries of one source in one bucket, drawn without end: one permutation of them after another."""

    source: int
    members: np.ndarray
    """Positions in the list of entries, int64."""
    per_epoch: int
    """Entries that an epoch draws."""

    def draw(self, epoch: int, *key: str | int) -> np.ndarray:
        """The draws of an epoch, which go on where those of the last one ended: int64 of shape ``(per_epoch,)``."""
        size = len(self.members)
        start, stop = epoch * self.per_epoch, (epoch + 1) * self.per_epoch
        passes = range(start // size, -(-stop // size))
        drawn = [self.members[keyed_permutation(size, *key, self.source, number)] for number in passes]
        offset = passes.start * size
        return np.concatenate(drawn)[start - offset : stop - offset]


class DataOrder:
    """An endless sequence of global batches, addressed by step.

    In each epoch every bucket is permuted and cut into global batches, and the batches of all buckets are permuted
    together. Without weights an epoch draws every entry once. With weights it draws about as many entries as there are,
    each source's share by its weight and spread over its buckets as the source's own entries are; a source goes through
    all of its entries before it repeats one.

    Args:
        buckets: of every entry.
        seed: of the run.
        digest: of the dataset.
        global_batch_size: entries in a batch.
        batch_sizes: other batch sizes, by bucket.
        tail: what becomes of a bucket's last, incomplete batch: `repeat` fills it up from the start of the bucket's
            permutation, `drop` leaves it out. `repeated_per_epoch` and `dropped_per_epoch` count the entries.
        sources: of every entry, the number of the dataset that it comes from; none means one dataset.
        weights: of the sources, in any unit; none means that every entry is drawn once.

    Raises:
        UserError: there are no entries; or `tail` drops the only batch of a bucket.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        seed: int,
        digest: str,
        global_batch_size: int,
        batch_sizes: Mapping[Bucket, int] | None = None,
        tail: Tail = "repeat",
        sources: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not buckets:
            raise UserError("latents.path: no sample is left to train on; check validation.holdout and the quarantine")
        self._seed, self._digest, self._tail = seed, digest, tail
        self._streams = make_streams(buckets, [0] * len(buckets) if sources is None else sources, weights)
        self._batch_sizes = {bucket: (batch_sizes or {}).get(bucket, global_batch_size) for bucket in self._streams}
        drawn = {bucket: sum(stream.per_epoch for stream in self._streams[bucket]) for bucket in self._streams}
        self._num_batches = {bucket: self._count_batches(bucket, drawn[bucket]) for bucket in self._streams}
        self.batches_per_epoch = sum(self._num_batches.values())
        surplus = [self._num_batches[bucket] * self._batch_sizes[bucket] - drawn[bucket] for bucket in self._streams]
        self.samples_per_epoch = sum(drawn.values()) + sum(surplus)
        self.repeated_per_epoch = sum(max(number, 0) for number in surplus)
        self.dropped_per_epoch = sum(max(-number, 0) for number in surplus)
        # The loader plans an epoch ahead of what it collates, and that is an epoch ahead of the training loop at times.
        self._batches_of = lru_cache(maxsize=3)(self._epoch_batches)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step`, counted from 0. May be called from several threads."""
        epoch, position = divmod(step, self.batches_per_epoch)
        bucket, indices = self._batches_of(epoch)[position]
        return GlobalBatch(step, epoch, bucket, tuple(indices.tolist()))

    def num_members(self, bucket: Bucket) -> int:
        """Entries of one bucket."""
        return sum(len(stream.members) for stream in self._streams[bucket])

    def replacement(self, batch: GlobalBatch, slot: int, attempt: int) -> int:
        """Stands in for a sample of `batch` that cannot be read: a function of its place and the attempt alone."""
        members = np.concatenate([stream.members for stream in self._streams[batch.bucket]])
        order = keyed_permutation(len(members), self._seed, "replacement", self._digest, batch.step, slot)
        return int(members[order[attempt % len(members)]])

    def _count_batches(self, bucket: Bucket, num_drawn: int) -> int:
        size = self._batch_sizes[bucket]
        if self._tail == "repeat":
            return -(-num_drawn // size)
        if num_drawn < size:
            raise UserError(
                f"training.tail drop: bucket {'x'.join(map(str, bucket))} has {num_drawn} samples, fewer than its "
                f"batch of {size}, so none of them would be seen; set training.tail to repeat or make the batch smaller"
            )
        return num_drawn // size

    def _epoch_batches(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        batches: list[tuple[Bucket, np.ndarray]] = []
        for bucket, streams in self._streams.items():
            key = (self._seed, "order", self._digest, str(bucket))
            order = np.concatenate([stream.draw(epoch, *key) for stream in streams])
            if len(streams) > 1:
                order = order[keyed_permutation(len(order), *key, "mix", epoch)]
            count, size = self._num_batches[bucket], self._batch_sizes[bucket]
            cut = np.resize(order, count * size).reshape(count, size)
            batches.extend((bucket, indices) for indices in cut)
        shuffle = keyed_permutation(len(batches), self._seed, "batches", self._digest, epoch)
        return [batches[i] for i in shuffle]


def make_streams(
    buckets: Sequence[Bucket], sources: Sequence[int], weights: Sequence[float] | None
) -> dict[Bucket, list[Stream]]:
    """The streams of every bucket, sorted; see `DataOrder` for what `weights` do."""
    members: dict[tuple[Bucket, int], list[int]] = {}
    for index, key in enumerate(zip(buckets, sources, strict=True)):
        members.setdefault(key, []).append(index)
    source_sizes = np.bincount(sources).tolist()
    if weights is None:
        shares = source_sizes
    else:
        total = sum(weight for weight, size in zip(weights, source_sizes, strict=False) if size)
        shares = [len(buckets) * weight / total for weight in weights]
    streams: dict[Bucket, list[Stream]] = {}
    for (bucket, source), indices in sorted(members.items()):
        per_epoch = max(1, round(shares[source] * len(indices) / source_sizes[source]))
        streams.setdefault(bucket, []).append(Stream(source, np.array(indices, dtype=np.int64), per_epoch))
    return streams
