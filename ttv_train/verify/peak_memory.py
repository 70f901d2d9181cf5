"""Bytes of the tensors that are alive, counted without a device's allocator."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """While active, counts the storage of every tensor that an operator returns, until nothing refers to it.

    What was allocated before does not count, and neither do temporaries inside an operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # A view of what came from outside is nothing new.
                if id(storage) not in self._alive and id(storage) not in known:
                    self._alive[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, id(storage), None)
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return result
