"""Faults that are put into a parallel run on purpose: the test of the test. Each must be caught by the comparison."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ttv_train.data.collate import Batch
from ttv_train.models.base import ModelFamily
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors


def why_not(fault: str, family: ModelFamily) -> str | None:
    """Why a family cannot have a fault, if so."""
    if fault == "skip-mask" and not family.uses_prompt_mask:
        return f"{family.name} attends to the padding of captions, as it was trained: there is no mask"
    if fault == "double-text" and not family.joint_attention:
        return f"{family.name} attends to text by cross attention, of which nothing is exchanged"
    return None


def spoil_batch(fault: str | None, batch: Batch) -> Batch:
    """The batch of the parallel run."""
    return replace(batch, prompt_mask=torch.ones_like(batch.prompt_mask)) if fault == "skip-mask" else batch


class FaultyAttention:
    """`SequenceParallel.attention` with a fault."""

    def __init__(self, fault: str, sequence: SequenceParallel) -> None:
        self._attention: Callable[..., Any] = sequence.attention
        self._fault, self._is_last_rank = fault, sequence.rank == sequence.degree - 1

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        text: TextTensors | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._fault == "drop-gradient" and self._is_last_rank:
            key, value = _scale_gradient(key, 0.0), _scale_gradient(value, 0.0)
        if self._fault == "double-text" and text is not None:
            text = (_scale_gradient(text[0], 2.0), _scale_gradient(text[1], 2.0), _scale_gradient(text[2], 2.0))
        result: tuple[torch.Tensor, torch.Tensor | None] = self._attention(query, key, value, text=text, **options)
        return result


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def _scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    scaled: torch.Tensor = _ScaleGradient.apply(x, factor)
    return scaled
