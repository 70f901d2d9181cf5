"""Applies a sequence plan to a plain model, from outside, by forward hooks."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan

WRAPPED_MODULE_ATTRIBUTES = ("_checkpoint_wrapped_module", "_orig_mod")
"""Where checkpoint_wrapper and torch.compile keep the module that they wrap."""


def parallelize_sequence(model: nn.Module, plan: SequencePlan, sequence: SequenceParallel) -> None:
    """Makes `model` cut and join its sequence where `plan` says.

    The order relative to checkpoint_wrapper and fully_shard does not matter: hooks sit on the modules themselves, and
    wrapped modules are looked through. Arguments are matched by the signature of the module's forward, so they may be
    passed by position or by keyword.

    Raises:
        ValueError: the plan names a module or an argument that the model does not have.
    """
    if sequence.degree == 1:
        return
    for path, dims in plan.shard.items():
        module = _module_at(model, path)
        signature = inspect.signature(module.forward)
        unknown = [name for name in dims if name not in signature.parameters]
        if unknown:
            raise ValueError(
                f"sequence plan: {type(module).__name__} at {path!r} has no argument {unknown[0]!r}; "
                f"it has {', '.join(signature.parameters)}"
            )
        module.register_forward_pre_hook(_ShardArguments(signature, dims, sequence), with_kwargs=True)
    for path, dim in plan.shard_output.items():
        _module_at(model, path).register_forward_hook(_ShardOutput(dim, sequence))
    for path, dim in plan.join.items():
        _module_at(model, path).register_forward_hook(_JoinOutput(path, dim, sequence))


def _module_at(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"sequence plan: {type(model).__name__} has no module {path!r}") from error
    while True:
        inner = next((getattr(module, name) for name in WRAPPED_MODULE_ATTRIBUTES if name in module._modules), None)
        if inner is None:
            return module
        module = inner


class _ShardArguments:
    def __init__(self, signature: inspect.Signature, dims: Mapping[str, int], sequence: SequenceParallel) -> None:
        self.signature, self.dims, self.sequence = signature, dims, sequence

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = self.signature.bind(*args, **kwargs)
        for name, dim in self.dims.items():
            if name in bound.arguments:
                bound.arguments[name] = _shard(self.sequence, bound.arguments[name], dim)
        return bound.args, bound.kwargs


class _ShardOutput:
    def __init__(self, dim: int, sequence: SequenceParallel) -> None:
        self.dim, self.sequence = dim, sequence

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _shard(self.sequence, output, self.dim)


def _shard(sequence: SequenceParallel, value: Any, dim: int) -> Any:
    if isinstance(value, torch.Tensor):
        return sequence.shard(value, dim)
    if isinstance(value, tuple | list):
        return type(value)(_shard(sequence, element, dim) for element in value)
    if value is None:
        return None
    raise ValueError(f"sequence plan: cannot cut a {type(value).__name__}")


class _JoinOutput:
    def __init__(self, path: str, dim: int, sequence: SequenceParallel) -> None:
        self.path, self.dim, self.sequence = path, dim, sequence

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"sequence plan: the output of {self.path!r} is a {type(output).__name__}, not a tensor")
        return self.sequence.join(output, self.dim)
