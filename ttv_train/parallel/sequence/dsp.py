"""Dynamic sequence parallelism: the sharded dimension switches, attention stays local (DSP, arXiv 2403.10266).

For models that factorise space-time attention: tokens are (B, T, S, C), spatial layers mix S within a frame, temporal
layers mix T at a location. Sharded over T, spatial layers are local; before a temporal layer one all-to-all shards S
instead, and after it one shards T again. With M the bytes of one hidden tensor a switch sends M (N-1) / N^2 per rank, a
spatial and temporal pair 4 M (N-1) / N^2 forward and backward: half of what Ulysses sends for the temporal layer alone.
"""

import math
from typing import Any

import torch

from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.base import DTYPES, SequenceParallel, TextTensors
from ttv_train.parallel.sequence.none import local_attention
from ttv_train.parallel.sequence.operators import group_named, operator
from ttv_train.parallel.sequence.shapes import allocate_pieces, split_sizes

PURPOSE = "dsp"


def _switch_shape(
    x: torch.Tensor, from_dim: int, to_dim: int, from_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    shape = list(x.shape)
    shape[to_dim] = split_sizes(x.shape[to_dim], len(from_sizes))[rank]
    shape[from_dim] = sum(from_sizes)
    return x.new_empty(shape)


@operator(_switch_shape)
def switch_dims(
    x: torch.Tensor, from_dim: int, to_dim: int, from_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    """Local along `from_dim` and whole along `to_dim` becomes whole along `from_dim` and local along `to_dim`."""
    # Pieces keep the order of dimensions of `x`, so that with one sample either packing or unpacking is no copy.
    leaving = x.split(split_sizes(x.shape[to_dim], len(from_sizes)), to_dim)
    if math.prod(x.shape[:to_dim]) == 1:
        send = x.contiguous()
    else:
        send, targets = allocate_pieces(x, [tuple(piece.shape) for piece in leaving])
        for target, piece in zip(targets, leaving, strict=True):
            target.copy_(piece)
    shape = list(leaving[rank].shape)
    shapes = [(*shape[:from_dim], size, *shape[from_dim + 1 :]) for size in from_sizes]
    received, arriving = allocate_pieces(x, shapes)
    arriving_sizes, leaving_sizes = ([piece.numel() for piece in pieces] for pieces in (arriving, leaving))
    collectives.all_to_all(received, send, arriving_sizes, leaving_sizes, group_named(group_name), PURPOSE)
    if math.prod(shape[:from_dim]) == 1:
        return received.view(*shape[:from_dim], sum(from_sizes), *shape[from_dim + 1 :])
    return torch.cat(arriving, dim=from_dim)


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, from_dim: int, to_dim: int, from_sizes: list[int], rank: int, group_name: str
    ) -> torch.Tensor:
        ctx.back = to_dim, from_dim, split_sizes(x.shape[to_dim], len(from_sizes)), rank, group_name
        return switch_dims(x, from_dim, to_dim, from_sizes, rank, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return switch_dims(grads[0], *ctx.back), None, None, None, None, None


class DynamicSequenceParallel(SequenceParallel):
    """Switches the sharded dimension between attention layers."""

    scheme = "dsp"
    attention_exchanges = False

    def switch(
        self, x: torch.Tensor, from_dim: int, to_dim: int, from_name: str = "tokens", to_name: str = "space"
    ) -> torch.Tensor:
        from_sizes = self.local_sizes(from_name)
        from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
        assert x.shape[from_dim] == from_sizes[self.rank], (tuple(x.shape), from_dim, from_sizes)
        if from_name not in self._agreed:
            shape = {f"size of dimension {dim}": size for dim, size in enumerate(x.shape) if dim != from_dim}
            self._check_agreement(from_name, shape | {"dtype": DTYPES.index(x.dtype)}, x.device)
        self._lengths[to_name] = x.shape[to_dim]
        self._agreed.add(to_name)
        assert self.group is not None
        switched: torch.Tensor = _Switch.apply(x, from_dim, to_dim, from_sizes, self.rank, self.group.group_name)
        return switched

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text: TextTensors | None,
        text_mask: torch.Tensor | None,
        scale: float | None,
        causal_block: int | None,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return local_attention(query, key, value, text, text_mask, scale, causal_block)
