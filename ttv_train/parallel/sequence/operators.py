"""Exchanges as operators of torch's dispatcher.

torch.compile takes an operator as it stands: it neither traces into the communication nor breaks the graph at it.
Selective activation checkpointing can keep an operator's results, so that recomputation does not communicate again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

_library = torch.library.Library("ttv_train", "FRAGMENT")


def operator(shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Makes a function of tensors, numbers, strings and lists of them an operator on every device, without autograd.

    Its results must alias neither its arguments nor each other.

    Args:
        shapes: takes the same arguments and returns empty tensors like the results.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        name = function.__name__.strip("_")
        _library.define(torch.library.infer_schema(function, op_name=name, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ttv_train::{name}", shapes, lib=_library)
        overload: torch._ops.OpOverload = getattr(torch.ops.ttv_train, name).default
        return overload

    return register


def group_named(name: str) -> dist.ProcessGroup:
    """The process group whose `group_name` this is: operators take strings, not groups."""
    return _resolve_process_group(name)  # type: ignore[arg-type]
