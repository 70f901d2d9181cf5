"""The order of the data: a function of (seed, epoch, dataset digest), the same on any number of ranks and workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ttv_train.errors import UserError
from ttv_train.parallel.rng import keyed_permutation

Bucket = tuple[int, int, int]


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step over all ranks. All are of one bucket."""

    step: int
    epoch: int
    bucket: Bucket
    indices: tuple[int, ...]
    """Positions in the list of entries that the order was built from; `global_batch_size` of them."""


class DataOrder:
    """An endless sequence of global batches, addressed by step.

    In each epoch every bucket is permuted and cut into global batches, and the batches of all buckets are permuted
    together. A bucket's last batch is filled up from the start of its permutation, so nothing is dropped;
    `repeated_per_epoch` counts those repeats.
    """

    def __init__(self, buckets: Sequence[Bucket], *, seed: int, digest: str, global_batch_size: int) -> None:
        if not buckets:
            raise UserError("latents.path: no sample is left to train on; check validation.holdout and the quarantine")
        self._seed = seed
        self._digest = digest
        self._batch_size = global_batch_size
        members: dict[Bucket, list[int]] = {}
        for index, bucket in enumerate(buckets):
            members.setdefault(bucket, []).append(index)
        self._members = {bucket: np.array(members[bucket], dtype=np.int64) for bucket in sorted(members)}
        self.batches_per_epoch = sum(-(-len(indices) // global_batch_size) for indices in members.values())
        self.repeated_per_epoch = self.batches_per_epoch * global_batch_size - len(buckets)
        # The loader's thread is an epoch ahead of the training loop at times.
        self._batches_of = lru_cache(maxsize=2)(self._epoch_batches)

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step `step`, counted from 0. May be called from several threads."""
        epoch, position = divmod(step, self.batches_per_epoch)
        bucket, indices = self._batches_of(epoch)[position]
        return GlobalBatch(step, epoch, bucket, tuple(indices.tolist()))

    def num_members(self, bucket: Bucket) -> int:
        """Entries of one bucket."""
        return len(self._members[bucket])

    def replacement(self, batch: GlobalBatch, slot: int, attempt: int) -> int:
        """Stands in for a sample of `batch` that cannot be read: a function of its place and the attempt alone."""
        members = self._members[batch.bucket]
        order = keyed_permutation(len(members), self._seed, "replacement", self._digest, batch.step, slot)
        return int(members[order[attempt % len(members)]])

    def _epoch_batches(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        batches: list[tuple[Bucket, np.ndarray]] = []
        for bucket, members in self._members.items():
            order = members[keyed_permutation(len(members), self._seed, "order", self._digest, epoch, str(bucket))]
            count = -(-len(members) // self._batch_size)
            filled = np.resize(order, count * self._batch_size)
            batches.extend((bucket, indices) for indices in filled.reshape(count, self._batch_size))
        shuffle = keyed_permutation(len(batches), self._seed, "batches", self._digest, epoch)
        return [batches[i] for i in shuffle]
