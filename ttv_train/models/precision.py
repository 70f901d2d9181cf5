"""Whole models in float64, for comparisons that are to be exact.

Models of diffusers compute norms and modulations in float32 whatever their weights are: right for bfloat16, but it
leaves two float64 runs that differ in the last bit with differences of 1e-8, in which real mistakes could hide.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Within it, `x.float()` and `x.to(torch.float32)` leave float64 tensors as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        to_float32 = func is torch.Tensor.float or (
            func is torch.Tensor.to and torch.float32 in (*args[1:], *kwargs.values())
        )
        if to_float32 and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def keep_float64(module: nn.Module) -> None:
    """Has every call of `module` be within `KeepFloat64`: a block that backward recomputes is called from autograd's
    engine, where no mode of the caller is active."""
    forward = module.forward

    @wraps(forward)
    def in_float64(*args: Any, **kwargs: Any) -> Any:
        with KeepFloat64():
            return forward(*args, **kwargs)

    module.forward = in_float64
