"""A job whose last ranks encode for the others.

Its ranks form two process groups that know nothing of each other, so that collectives without a named group, which are
most of those of training, are between the ranks that train. The ranks that encode are joined to those that they feed by
pairs of gloo, over which messages go.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ttv_train.config import ParallelConfig
from ttv_train.devices.base import DeviceBackend
from ttv_train.errors import UserError
from ttv_train.parallel.mesh import check_degrees, distributed, is_launched, process_group

ENCODER, TRAINER = 0, 1
"""Ranks in a link."""


@dataclass(frozen=True)
class JobPart:
    """What this process is in the job. Its default process group is that of the ranks that do the same."""

    device: torch.device
    encodes: bool = False
    """It does not train."""
    links: list[dist.ProcessGroup] = field(default_factory=list)
    """Pairs of an encoder and a trainer. Only the first rank of a group that shares clips has any."""


@contextmanager
def split_job(
    backend: DeviceBackend, config: ParallelConfig, num_encoders: int, encoder_degree: int
) -> Iterator[JobPart]:
    """Joins the job that the launcher describes, or is one of its own.

    Args:
        config: of the ranks that train.
        num_encoders: ranks that do not; without any this is `distributed`.
        encoder_degree: encoders that share each clip.

    Raises:
        UserError: on every rank, if the numbers do not fit the number of processes.
    """
    if not num_encoders:
        with distributed(backend, config.timeout_seconds) as device:
            yield JobPart(device)
        return
    if not is_launched():
        raise UserError(
            f"latents.encoder_ranks {num_encoders}: this is a single process; start several with torchrun or accelerate"
        )
    timeout = timedelta(seconds=config.timeout_seconds)
    store, rank, num_ranks = next(iter(dist.rendezvous("env://", timeout=timeout)))
    num_trainers = num_ranks - num_encoders
    if num_trainers < 1 or num_encoders % encoder_degree:
        raise UserError(
            f"latents.encoder_ranks {num_encoders} of {num_ranks} process(es): it must be a multiple of "
            f"vae.parallel.degree {encoder_degree} and leave ranks that train"
        )
    check_degrees(config, num_trainers)
    encodes = rank >= num_trainers
    mine, members = (rank - num_trainers, num_encoders) if encodes else (rank, num_trainers)
    members_store = dist.PrefixStore("encoders" if encodes else "trainers", store)
    device = backend.device(int(os.environ.get("LOCAL_RANK", "0")))
    with process_group(backend, timeout, store=members_store, rank=mine, world_size=members):
        degree = encoder_degree if encodes else config.sequence.degree
        links: list[dist.ProcessGroup] = []
        if mine % degree == 0:
            pairs = linked(num_trainers // config.sequence.degree, num_encoders // encoder_degree)
            for trainer, encoder in pairs:
                if mine // degree == (encoder if encodes else trainer):
                    pair_store = dist.PrefixStore(f"link {trainer} {encoder}", store)
                    pair = dist.ProcessGroupGloo(pair_store, ENCODER if encodes else TRAINER, 2, timeout)
                    links.append(cast(dist.ProcessGroup, pair))
        yield JobPart(device, encodes, links)


def linked(num_trainers: int, num_encoders: int) -> list[tuple[int, int]]:
    """Pairs (trainer, encoder) such that each has a partner, and all of the more numerous kind exactly one."""
    few = min(num_trainers, num_encoders)
    return [
        (trainer, encoder)
        for trainer in range(num_trainers)
        for encoder in range(num_encoders)
        if trainer % few == encoder % few
    ]
