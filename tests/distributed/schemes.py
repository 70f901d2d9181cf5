"""Every scheme of sequence parallelism by name, for a world of one group."""

import torch.distributed as dist

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel.sequence import build_sequence_parallel
from ttv_train.parallel.sequence.base import SequenceParallel

SCHEMES: dict[str, dict[str, str]] = {
    "ulysses": {"scheme": "ulysses"},
    "ring": {"scheme": "ring", "ring_mode": "rotate"},
    "ring-gather": {"scheme": "ring", "ring_mode": "gather"},
    "usp": {"scheme": "usp", "ring_mode": "rotate"},
    "usp-gather": {"scheme": "usp", "ring_mode": "gather"},
}
BALANCED = {"causal-ring": "ring", "causal-usp": "usp"}
"""Rings in which every rank holds an early and a late run of tokens."""


def scheme_settings(name: str, degree: int, **settings: object) -> dict[str, object]:
    """Fields of the config; usp takes ulysses groups of 2 where 2 divides the degree."""
    fields: dict[str, object] = {**SCHEMES[BALANCED.get(name, name)], "degree": degree, **settings}
    if fields["scheme"] == "usp":
        fields.setdefault("ulysses_degree", 2 if degree % 2 == 0 else degree)
    return fields


def build_scheme(name: str, group: dist.ProcessGroup | None = None, **settings: object) -> SequenceParallel:
    """The scheme over `group`, by default all ranks."""
    group = group or dist.group.WORLD
    fields = scheme_settings(name, dist.get_world_size(group), **settings)
    return build_sequence_parallel(SequenceParallelConfig.model_validate(fields), group, causal=name in BALANCED)
