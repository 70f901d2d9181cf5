"""FSDP2 from outside the model: parameters, gradients and optimizer state sharded over every rank."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ttv_train.config import ParallelConfig
from ttv_train.parallel.mesh import ParallelMesh
from ttv_train.parallel.sequence.base import SequenceParallel


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    mesh: ParallelMesh,
    sequence: SequenceParallel,
    compute_dtype: torch.dtype,
) -> None:
    """Shards `model` in place over the flattened data x sequence mesh, one all-gather per block.

    Gradients are summed, not averaged, over the ranks: the loss is already a sum divided by the global element count,
    and ranks of one sequence-parallel group hold different terms of that sum. Parameters stay float32; they are cast
    to `compute_dtype` when gathered, and gradients are reduced in float32 (float64 for float64).
    """
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    # The root must not cast its inputs: bfloat16 would round timesteps to 507 of 1000 values.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # Predictions are views of the unpatched tokens; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    blocks = list(blocks)
    if config.activation_checkpointing:
        targets = set(blocks)
        contexts = partial(sequence.checkpoint_contexts, keep_attention=config.keep_attention)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=contexts),
            check_fn=lambda module: module in targets,
        )
    for block in blocks:
        fully_shard(block, mesh=mesh.world, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh.world, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum; a plain sum is what is meant on every backend.
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: only the last micro-batch of a step does."""
    cast(FSDPModule, model).set_requires_gradient_sync(enabled)
