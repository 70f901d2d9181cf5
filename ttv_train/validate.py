"""The validation loss: fixed clips, fixed timesteps, fixed noise, so that two numbers differ by the weights alone."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ttv_train.config import ValidationConfig
from ttv_train.data.collate import Batch, Collator
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentSample
from ttv_train.diffusion.base import Objective
from ttv_train.errors import UserError
from ttv_train.models.base import ModelFamily
from ttv_train.parallel.agreement import on_all_ranks
from ttv_train.parallel.mesh import ParallelMesh
from ttv_train.parallel.rng import keyed_permutation
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.step import loss_sum


def split_holdout(
    entries: Sequence[LatentEntry], config: ValidationConfig, seed: int
) -> tuple[list[LatentEntry], list[LatentEntry]]:
    """Splits entries into training and validation sets by `validation.holdout`, the same on every rank.

    A held-out video takes all of its clips along, so that no frame of it is trained on. The validation set is capped
    at `validation.max_clips`; what is beyond the cap stays held out.
    """
    if config.holdout == "none":
        training, held_out = list(entries), list(entries)
    elif config.holdout == "last_clips":
        training = [entry for entry in entries if not (entry.is_last_clip and entry.clip_index > 0)]
        held_out = [entry for entry in entries if entry.is_last_clip and entry.clip_index > 0]
    else:
        videos = sorted({entry.source_sha256 for entry in entries})
        count = max(1, round(config.holdout_fraction * len(videos)))
        order = keyed_permutation(len(videos), seed, "holdout")
        chosen = {videos[i] for i in order[:count]}
        training = [entry for entry in entries if entry.source_sha256 not in chosen]
        held_out = [entry for entry in entries if entry.source_sha256 in chosen]
    order = keyed_permutation(len(held_out), seed, "validation clips")
    return training, [held_out[i] for i in sorted(order[: config.max_clips])]


def read_holdout(
    dataset: LatentDataset, entries: Sequence[LatentEntry], on_bad_sample: Callable[[LatentEntry, str], None]
) -> list[LatentSample]:
    """The validation samples, on all ranks together. One that any rank cannot read is reported and left out on all.

    Raises:
        UserError: on every rank, if there is nothing to validate on.
    """
    samples: dict[str, LatentSample] = {}
    problems: dict[str, str] = {}

    def read() -> dict[str, str]:
        for entry, result in zip(entries, dataset.read_many(entries), strict=True):
            if isinstance(result, CorruptSampleError):
                problems[entry.key] = str(result)
            else:
                samples[entry.key] = result
        return problems

    for reported in on_all_ranks(read):
        problems.update(reported)
    for entry in entries:
        if entry.key in problems:
            on_bad_sample(entry, problems[entry.key])
    good = [samples[entry.key] for entry in entries if entry.key not in problems]
    if not good:
        raise UserError("validation.holdout: no clip that qualifies can be read; use another holdout, or encode again")
    return good


def validation_batches(samples: Sequence[LatentSample], collator: Collator, micro_batch_size: int) -> list[Batch]:
    """Batches of equal buckets; their noise is keyed by the sample alone, so it is the same at every validation."""
    batches = []
    for bucket in sorted({sample.entry.bucket for sample in samples}):
        members = [sample for sample in samples if sample.entry.bucket == bucket]
        for start in range(0, len(members), micro_batch_size):
            chunk = members[start : start + micro_batch_size]
            batches.append(collator(chunk, step=-1, slots=[0] * len(chunk)))
    return batches


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    family: ModelFamily,
    objective: Objective,
    sequence: SequenceParallel,
    mesh: ParallelMesh,
    batches: Sequence[Batch],
    noise_levels: Sequence[float],
    compute_dtype: torch.dtype,
) -> dict[float, float]:
    """Mean squared error at each noise level, over all batches; the same on every rank.

    Batches are dealt to the data-parallel ranks. A rank that runs out repeats its last batch with weight zero, because
    sharded parameters are gathered by all ranks together.
    """
    rounds = -(-len(batches) // mesh.data_degree)
    sums = torch.zeros(len(noise_levels), dtype=torch.float64, device=mesh.device)
    for turn in range(rounds):
        index = turn * mesh.data_degree + mesh.data_rank
        batch = batches[min(index, len(batches) - 1)]
        for position, level in enumerate(noise_levels):
            timesteps = torch.full((len(batch.keys),), objective.timestep_at(level), dtype=torch.float32)
            error = loss_sum(model, family, objective, sequence, batch, timesteps, mesh.device, compute_dtype)
            if index < len(batches):
                sums[position] += error.double()
    dist.all_reduce(sums)
    elements = sum(batch.latents.numel() for batch in batches)
    return {level: float(total) / elements for level, total in zip(noise_levels, sums, strict=True)}
