"""Sequence parallelism: several ranks share the tokens of one video."""

import torch.distributed as dist

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel
from ttv_train.parallel.sequence.ulysses import UlyssesSequenceParallel

__all__ = ["SequenceParallel", "build_sequence_parallel"]


def build_sequence_parallel(config: SequenceParallelConfig, group: dist.ProcessGroup) -> SequenceParallel:
    """The scheme of `config` over `group`, whose ranks share each sequence."""
    if config.degree == 1:
        return NoSequenceParallel()
    assert dist.get_world_size(group) == config.degree
    return UlyssesSequenceParallel(group)
