"""Ranks that agree on what happened, so that none waits in a collective for one that has given up."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ttv_train.errors import UserError

T = TypeVar("T")


def world_rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_all_ranks(function: Callable[[], T]) -> list[T]:
    """Calls `function`, which must not communicate, on every rank and returns every rank's result, in rank order.

    Raises:
        UserError, OSError, RuntimeError: on every rank if `function` raised on any: the first of these kinds that fits
            the exception of the lowest rank that failed, which is named.
    """
    if world_size() == 1:
        return [function()]
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(outcomes, (result, _portable(failure)))
    except RuntimeError as error:
        # A rank is gone. Where `function` has failed for it, that says more.
        raise failure or error from error
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            kind, message = problem
            raise kind(message if kind is UserError else f"rank {rank}: {message}") from failure
    return [value for value, _ in outcomes]


def on_every_rank(function: Callable[[], T]) -> T:
    """Calls `function`, which must not communicate, on every rank; each keeps its own result, which is not exchanged.
    Raises as `on_all_ranks` does."""
    results: list[T] = []
    on_all_ranks(lambda: results.append(function()))
    return results[0]


def on_main_rank(function: Callable[[], T]) -> T:
    """Calls `function` on rank 0 only and returns its result on every rank; raises as `on_all_ranks` does."""
    return on_all_ranks(lambda: [function()] if world_rank() == 0 else [])[0][0]


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """The kind of an exception and a message; exceptions of libraries do not all survive a pickle."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return UserError, str(error)
    if isinstance(error, OSError):
        return OSError, str(error)
    return RuntimeError, "".join(traceback.format_exception(error))
