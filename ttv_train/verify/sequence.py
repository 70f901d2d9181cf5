"""Sequence-parallel training against one process: loss, the gradient of every parameter, and bytes sent.

Each case is what the trainer does in a step: the loss of `ttv_train.step.loss_sum` and its backward pass, through a
model with a shared sequence, recomputed blocks and sharded parameters. The reference is the same model, plain.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ttv_train.config import ParallelConfig
from ttv_train.data.collate import Batch
from ttv_train.devices import get_backend
from ttv_train.diffusion import build_objective
from ttv_train.errors import UserError
from ttv_train.models.build import parallelize_model
from ttv_train.models.precision import KeepFloat64
from ttv_train.parallel.mesh import ParallelMesh, build_mesh
from ttv_train.parallel.sequence import build_sequence_parallel, check_heads
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel
from ttv_train.step import loss_sum
from ttv_train.verify.cases import ModelCase, SchemeCase, scheme_cases
from ttv_train.verify.comparison import Comparison, Gradients, differences, verdict
from ttv_train.verify.faults import FaultyAttention, spoil_batch, why_not
from ttv_train.verify.ranks import run_ranks
from ttv_train.verify.traffic import recorded, replaced


def verify_model(
    case: ModelCase,
    schemes: Sequence[str],
    degree: int,
    *,
    dtype: str,
    device_backend: str = "cpu",
    fault: str | None = None,
) -> list[Comparison]:
    """Compares a model under the schemes of these names, over `degree` ranks, with one process.

    Args:
        dtype: `float64` or `float32`.
        fault: one of `ttv_train.verify.FAULTS`, put into the parallel runs.

    Raises:
        UserError: the model of a run's config cannot be built, or there are fewer devices than ranks.
    """
    no_fault = why_not(fault, case.family) if fault is not None else None
    possible, comparisons = [], []
    for scheme in scheme_cases(schemes, degree):
        reason = no_fault or _refusal(case, scheme)
        if reason is None:
            possible.append(scheme)
        else:
            comparisons.append(
                Comparison(case.name, scheme.name, degree, case.latent_shapes[0], 0, "impossible", reason)
            )
    if possible:
        arguments = case, possible, dtype, device_backend, fault
        comparisons += run_ranks(degree, compare_on_ranks, *arguments, device_backend=device_backend)[0]
    return comparisons


def _refusal(case: ModelCase, scheme: SchemeCase) -> str | None:
    """Why the family's declared capabilities exclude a scheme, if they do."""
    family, num_heads = case.family, case.num_attention_heads
    if scheme.config.scheme not in family.sequence_schemes:
        return f"{family.name} can be shared by {', '.join(family.sequence_schemes)}"
    try:
        check_heads(scheme.config, num_heads)
    except UserError as error:
        return str(error)
    return None


def compare_on_ranks(
    rank: int,
    world_size: int,
    case: ModelCase,
    schemes: Sequence[SchemeCase],
    dtype_name: str,
    device_backend: str,
    fault: str | None,
) -> list[Comparison]:
    """What each rank of `run_ranks` does; the comparisons are made on rank 0."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    device = get_backend(device_backend).device(rank)
    mesh = build_mesh(ParallelConfig.model_validate({"sequence": schemes[0].config.model_dump()}), device)
    sequences = {scheme.name: build_sequence_parallel(scheme.config, mesh.sequence_group) for scheme in schemes}
    comparisons = []
    for latent_shape in case.latent_shapes:
        batch = make_batch(case, latent_shape, dtype)
        reference = None
        if rank == 0:
            model = case.build(dtype).to(device)
            sequence = NoSequenceParallel()
            case.family.install_attention(model, sequence)
            loss = _backward(case, model, sequence, batch, device, dtype)
            reference = Gradients(loss, {name: _gradient(parameter) for name, parameter in model.named_parameters()})
        for scheme in schemes:
            run = run_parallel(case, mesh, scheme, sequences[scheme.name], batch, dtype, fault)
            if reference is None:
                continue
            loss, gradient, parameter = differences(run.found, reference)
            reason = verdict(loss, gradient, parameter, run.traffic, dtype_name)
            sent, formula = max(run.traffic)
            comparisons.append(
                Comparison(
                    model=case.name,
                    scheme=scheme.name,
                    degree=world_size,
                    latent_shape=latent_shape,
                    tokens=run.tokens,
                    status="failed" if reason else "passed",
                    reason=reason,
                    loss_difference=loss,
                    gradient_difference=gradient,
                    parameter=parameter,
                    bytes_per_block=sent,
                    formula_bytes_per_block=formula,
                    seconds=run.seconds,
                )
            )
    return comparisons


@dataclass(frozen=True)
class ParallelRun:
    """What all ranks found together."""

    found: Gradients
    traffic: list[tuple[float, float]]
    """Bytes per block of each rank, counted and by the formula."""
    seconds: float
    tokens: int


def run_parallel(
    case: ModelCase,
    mesh: ParallelMesh,
    scheme: SchemeCase,
    sequence: SequenceParallel,
    batch: Batch,
    dtype: torch.dtype,
    fault: str | None,
) -> ParallelRun:
    """A step of `model` on all ranks of `mesh`, as the trainer does it."""
    model = case.build(dtype)
    grid = case.family.token_grid(model, tuple(batch.latents.shape[1:]))
    config = ParallelConfig(activation_checkpointing=True)
    parallelize_model(model, case.family, config, mesh, sequence, dtype)
    with contextlib.ExitStack() as stack:
        if fault is not None:
            stack.enter_context(replaced(sequence, "attention", FaultyAttention(fault, sequence)))
        record = stack.enter_context(recorded(scheme.config, sequence))
        dist.barrier()
        started = time.perf_counter()
        loss = _backward(case, model, sequence, spoil_batch(fault, batch), mesh.device, dtype)
        dist.barrier()
        seconds = time.perf_counter() - started
    total = torch.tensor(loss, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(total)
    traffic: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(traffic, record.per_block())
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): _gradient(parameter)
        for name, parameter in model.named_parameters()
    }
    return ParallelRun(Gradients(float(total), gradients), traffic, seconds, math.prod(grid))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The whole gradient of a parameter, zero where no rank has one."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    whole: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach()


def make_batch(case: ModelCase, latent_shape: tuple[int, ...], dtype: torch.dtype) -> Batch:
    """Two random clips, the second with about half as many words as the first."""
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    latents, noise = draw(2, *latent_shape), draw(2, *latent_shape)
    prompts = draw(2, case.text_tokens, case.text_channels)
    lengths = torch.tensor([case.text_tokens, max(1, case.text_tokens // 2)])
    return Batch(
        keys=["first", "second"],
        bucket=(8 * latent_shape[1], 8 * latent_shape[2], 8 * latent_shape[3]),
        fps=torch.tensor([8.0, 24.0]),
        latents=latents.to(dtype),
        noise=noise.to(dtype),
        uniform=torch.tensor([0.3, 0.8], dtype=torch.float64),
        prompt_embeds=prompts.to(dtype),
        prompt_mask=torch.arange(case.text_tokens) < lengths[:, None],
    )


def _backward(
    case: ModelCase,
    model: nn.Module,
    sequence: SequenceParallel,
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """One step's loss and its backward pass, as the trainer does them. Returns this rank's share of the loss."""
    objective = build_objective(case.objective, case.family)
    timesteps = objective.timesteps(batch.uniform, batch.bucket)
    with KeepFloat64() if dtype == torch.float64 else contextlib.nullcontext():
        total = loss_sum(model, case.family, objective, sequence, batch, timesteps, device, dtype)
        loss = total / batch.latents.numel()
        loss.backward()
    return float(loss.detach())
