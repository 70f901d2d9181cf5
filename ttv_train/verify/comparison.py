"""What a comparison with one process found, and how it is shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
"""Largest relative difference of the loss and of a parameter's gradient, by the type that everything is computed in."""
NEGLIGIBLE = 1e-3
"""Gradients whose norm is a smaller part of the largest one are compared on that scale: some are zero but for rounding,
such as that of a bias of keys, which a softmax does not feel."""


@dataclass(frozen=True)
class Comparison:
    """One case: a model under a scheme, with one shape of latents."""

    model: str
    scheme: str
    degree: int
    latent_shape: tuple[int, ...]
    """``(C, t, h, w)``"""
    tokens: int
    status: Literal["passed", "failed", "impossible"]
    reason: str = ""
    """Why it failed, or why the model cannot be shared like that."""
    loss_difference: float = 0.0
    """Relative."""
    gradient_difference: float = 0.0
    """Largest over all parameters of the norm of the difference, relative to the parameter's gradient."""
    parameter: str = ""
    """Whose gradient differs most."""
    bytes_per_block: float = 0.0
    """Sent by the busiest rank for one attention block (under dsp one pair of blocks), with its recomputation."""
    formula_bytes_per_block: float = 0.0
    seconds: float = 0.0
    """Forward and backward of all ranks."""


@dataclass(frozen=True)
class Gradients:
    """A run's loss and the whole gradient of every parameter."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def differences(found: Gradients, reference: Gradients) -> tuple[float, float, str]:
    """Relative difference of the loss, and of the gradient that differs most, with its parameter's name."""
    norms = {name: float(gradient.norm()) for name, gradient in reference.gradients.items()}
    smallest = NEGLIGIBLE * max(norms.values())
    by_parameter = {
        name: float((found.gradients[name] - gradient).norm()) / max(norms[name], smallest)
        for name, gradient in reference.gradients.items()
    }
    # NaN is neither smaller nor larger than anything; it must be the worst.
    worst = max(by_parameter, key=lambda name: math.inf if math.isnan(by_parameter[name]) else by_parameter[name])
    return abs(found.loss - reference.loss) / abs(reference.loss), by_parameter[worst], worst


def verdict(loss: float, gradient: float, parameter: str, traffic: Sequence[tuple[float, float]], dtype: str) -> str:
    """What is wrong with a parallel run, or an empty string.

    Args:
        loss, gradient: relative differences, the latter of `parameter`.
        traffic: bytes per block of each rank, counted and by the formula.
    """
    tolerance = TOLERANCES[dtype]
    if not loss <= tolerance:
        return f"the loss differs by more than {tolerance:g}"
    if not gradient <= tolerance:
        return f"the gradient of {parameter} differs by more than {tolerance:g}"
    if any(counted != expected for counted, expected in traffic):
        return "the bytes sent differ from the formula"
    return ""


COLUMNS = ("model", "scheme", "ranks", "shapes", "loss diff", "gradient diff", "bytes/block", "formula", "seconds", "")


def format_table(comparisons: Sequence[Comparison]) -> str:
    """A line for each model, scheme and number of ranks, with the worst of its shapes."""
    groups: dict[tuple[str, str, int], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.model, comparison.scheme, comparison.degree), []).append(comparison)
    rows = [COLUMNS, *map(_cells, groups.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def _cells(group: Sequence[Comparison]) -> tuple[str, ...]:
    worst = max(group, key=lambda comparison: (comparison.status == "failed", comparison.gradient_difference))
    which = worst.model, worst.scheme, str(worst.degree)
    if worst.status == "impossible":
        return (*which, *[""] * 6, f"impossible: {worst.reason}")
    passed = sum(comparison.status == "passed" for comparison in group)
    latents = "x".join(map(str, worst.latent_shape))
    return (
        *which,
        f"{passed}/{len(group)}",
        f"{max(comparison.loss_difference for comparison in group):.1e}",
        f"{worst.gradient_difference:.1e}",
        f"{worst.bytes_per_block:,.0f}",
        f"{worst.formula_bytes_per_block:,.0f}",
        f"{sum(comparison.seconds for comparison in group):.2f}",
        f"FAILED at latents {latents}: {worst.reason}" if worst.status == "failed" else f"ok ({worst.parameter})",
    )
