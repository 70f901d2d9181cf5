"""Model and optimizer state as named tensors, in memory that checkpoints read from and write into."""

from collections.abc import Container

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ttv_train.parallel.parameters import parameters_at_rest


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, sharded as they rest; they share the model's memory."""
    parameters_at_rest(model)
    return model.state_dict()


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state as PARAMETER.SLOT, such as proj.weight.exp_avg; it shares the optimizer's memory."""
    names = _names(model)
    return {
        f"{names[parameter]}.{slot}": value
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def materialize_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: Container[str]) -> None:
    """Makes the state that an optimizer otherwise first makes when it steps, for parameters whose slots are `wanted`.

    The values are of no use; they are there to be read into. Weights do not change.
    """
    # Optimizers have no other way to make their state than a step, which this takes with zero gradients and rates.
    optimizer.zero_grad(set_to_none=True)
    get_optimizer_state_dict(model, optimizer)
    names = _names(model)
    for parameter, slots in list(optimizer.state.items()):
        if not any(f"{names[parameter]}.{slot}" in wanted for slot in slots):
            del optimizer.state[parameter]


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in parameters_at_rest(model).items()}
