"""A model's parameters as they rest between steps: sharded, and named as in its state dict."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

CHECKPOINT_WRAPPER_PREFIX = "_checkpoint_wrapped_module."


def parameters_at_rest(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, this rank's shards where `fully_shard` has sharded them.

    Blocks that kept their gathered parameters after a forward pass (`reshard_after_forward=False`) drop them first:
    otherwise the model would list them in place of its shards, and would go on computing with them after a shard has
    been changed. Names leave out activation checkpointing's wrappers, as state dicts do.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name.replace(CHECKPOINT_WRAPPER_PREFIX, ""): parameter for name, parameter in model.named_parameters()}


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor as it is. Both without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
