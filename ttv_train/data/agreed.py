"""The next batches, or the same error on every rank: nobody enters the forward pass while another has given up."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ttv_train.data.collate import Batch
from ttv_train.data.loader import LatentLoader
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks
from ttv_train.parallel.mesh import ParallelMesh


class AgreedBatches:
    """Takes the micro-batches of each step from a loader and has all ranks agree about them; 24 bytes a step.

    Args:
        loader: this rank's loader.
        steps: its iterator over steps.
        max_bad_fraction: the largest part of the entries that may be unreadable.
    """

    def __init__(
        self, loader: LatentLoader, steps: Iterator[list[Batch]], mesh: ParallelMesh, max_bad_fraction: float
    ) -> None:
        self._loader, self._steps, self._mesh, self._max_bad_fraction = loader, steps, mesh, max_bad_fraction
        self._num_bad = 0

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step. All ranks call it together.

        Raises:
            UserError: on every rank, if one of them has no batch, too many samples are unreadable, or ranks that share
                a sequence hold different samples, because one of them could not read what another could. Their
                exchanges would mix the two without an error.
        """
        batches: list[Batch] = []
        failure: Exception | None = None
        try:
            batches = next(self._steps)
        except Exception as error:
            failure = error
        differ = samples_differ(batches, self._mesh)
        num_bad = len(self._loader.bad_keys)
        facts = torch.tensor([failure is not None, differ, num_bad], dtype=torch.int64, device=self._mesh.device)
        dist.all_reduce(facts)
        any_failure, any_difference, total_bad = facts.tolist()
        if any_failure:
            on_all_ranks(lambda: _raise(failure))
        if total_bad != self._num_bad:
            self._num_bad = total_bad
            self._count_bad_samples()
        if any_difference:
            raise UserError(
                "latents.path: ranks that share a sequence read different samples, because one of them could not read "
                "what another could; see quarantine.jsonl, then start again: the run goes on from its newest checkpoint"
            )
        return batches

    def _count_bad_samples(self) -> None:
        bad = set().union(*on_all_ranks(lambda: set(self._loader.bad_keys)))
        entries = self._loader.entries
        if len(bad) > self._max_bad_fraction * len(entries):
            shards = sorted({entry.shard for entry in entries if entry.key in bad})
            raise UserError(
                f"latents.path {self._loader.store.path}: {len(bad)} of {len(entries)} samples are corrupt, more than "
                f"latents.max_bad_fraction {self._max_bad_fraction}; remove {', '.join(shards[:3])}"
                f"{' and others' if len(shards) > 3 else ''} and run `ttv-train encode` again, which renews them"
            )


def samples_differ(batches: Sequence[Batch], mesh: ParallelMesh) -> bool:
    """Whether the ranks that share a sequence hold different samples, the same answer on all of them."""
    if mesh.sequence_degree == 1:
        return False
    keys = "\n".join(key for batch in batches for key in batch.keys)
    digest = int.from_bytes(hashlib.sha256(keys.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.sequence_group)
    return int(extremes[0]) != -int(extremes[1])


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
