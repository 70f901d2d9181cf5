"""Sequence parallelism: several ranks share the tokens of one video."""

import torch
import torch.distributed as dist

from ttv_train.config import SequenceParallelConfig
from ttv_train.errors import UserError
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.dsp import DynamicSequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel
from ttv_train.parallel.sequence.ring import RingSequenceParallel
from ttv_train.parallel.sequence.ulysses import UlyssesSequenceParallel
from ttv_train.parallel.sequence.usp import UnifiedSequenceParallel

__all__ = ["SequenceParallel", "build_sequence_parallel", "check_heads"]


def check_heads(config: SequenceParallelConfig, num_heads: int) -> None:
    """Refuses a degree that leaves ranks without attention heads. Other numbers of heads all work.

    Args:
        num_heads: query heads of the model's attention.

    Raises:
        UserError: naming the key and the mend.
    """
    match config.scheme:
        case "ulysses":
            key, degree, mend = "degree", config.degree, "lower it, or use scheme ring or usp"
        case "usp":
            key, degree, mend = "ulysses_degree", config.ulysses_degree or 1, "lower it"
        case _:
            return
    if degree > num_heads:
        raise UserError(
            f"parallel.sequence.{key} {degree}: scheme {config.scheme} gives every one of these ranks an attention "
            f"head, and the model has {num_heads}; {mend}"
        )


def build_sequence_parallel(
    config: SequenceParallelConfig, group: dist.ProcessGroup, causal: bool = False
) -> SequenceParallel:
    """The scheme of `config` over `group`, whose ranks share each sequence. They all call it together.

    Args:
        causal: the model's attention is causal or block-causal; ranks of a ring then hold tokens so that each has the
            same work.
    """
    if config.degree == 1:
        return NoSequenceParallel()
    assert dist.get_world_size(group) == config.degree
    # At least float32, unless the config wants less.
    gradient_dtype = torch.bfloat16 if config.ring_gradient_dtype == "bfloat16" else None
    match config.scheme:
        case "ulysses":
            return UlyssesSequenceParallel(group)
        case "ring":
            return RingSequenceParallel(group, config.ring_mode, gradient_dtype, causal)
        case "usp":
            assert config.ulysses_degree is not None
            return UnifiedSequenceParallel(group, config.ulysses_degree, config.ring_mode, gradient_dtype, causal)
        case "dsp":
            return DynamicSequenceParallel(group)
        case "none":
            raise AssertionError("the config has refused scheme none with a degree above 1")
