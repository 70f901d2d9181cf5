"""From noise to latents with the solvers that the families' pipelines use, as diffusers implements them."""

from collections.abc import Callable, Sequence

import torch
from diffusers import CogVideoXDPMScheduler

from ttv_train.diffusion.base import Bucket, Objective
from ttv_train.errors import UserError

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents (B, C, t, h, w), timesteps (B,) float32) to the model's prediction, with guidance applied."""


@torch.no_grad()
def sample(
    denoise: Denoise,
    objective: Objective,
    latents: torch.Tensor,
    num_steps: int,
    *,
    bucket: Bucket,
    solver: str | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> torch.Tensor:
    """Solves from noise to data in `num_steps` calls of `denoise`.

    The schedulers of `velocity` end at exactly clean latents only when `num_steps` divides 1000; otherwise they stop a
    timestep before.

    Args:
        latents: initial noise (B, C, t, h, w) float32.
        bucket: shape of the clips, by which some families shift timesteps.
        solver: one of `objective.solvers`, by default the first.
        generators: one per sample, for the solver that draws noise on its way (`dpm`); the others are deterministic.

    Returns:
        Normalized latents (B, C, t, h, w) float32.

    Raises:
        UserError: a solver that cannot sample this model, or more steps than the schedule has.
        ValueError: `dpm` without generators.
    """
    solver = solver or objective.solvers[0]
    if solver not in objective.solvers:
        raise UserError(f"sampling.solver {solver} does not fit the objective; use {' or '.join(objective.solvers)}")
    if num_steps > objective.num_train_timesteps:
        raise UserError(f"sampling.num_steps {num_steps} exceeds the schedule's {objective.num_train_timesteps} steps")
    scheduler = objective.scheduler(solver, num_steps, latents.device, bucket)
    if isinstance(scheduler, CogVideoXDPMScheduler):
        if generators is None:
            raise ValueError("solver dpm draws noise: pass one generator per sample")
        return _sample_dpm(denoise, scheduler, latents, list(generators))
    for timestep in scheduler.timesteps:
        prediction = denoise(latents, timestep.float().expand(len(latents)))
        (latents, *_) = scheduler.step(prediction.float(), timestep, latents, return_dict=False)
    return latents


def _sample_dpm(
    denoise: Denoise, scheduler: CogVideoXDPMScheduler, latents: torch.Tensor, generators: list[torch.Generator]
) -> torch.Tensor:
    """DPM-Solver++(2M) with noise (arXiv 2211.01095): each step also takes the previous estimate of the clean latents
    and its timestep. The scheduler sees (B, t, C, h, w) as in the family's pipeline, so that a seed draws the same."""
    previous_timestep, previous_clean = None, None
    for timestep in scheduler.timesteps:
        prediction = denoise(latents, timestep.float().expand(len(latents))).float()
        stepped, previous_clean = scheduler.step(
            prediction.transpose(1, 2),
            previous_clean,
            timestep,
            previous_timestep,
            latents.transpose(1, 2),
            generator=generators,
        )
        latents, previous_timestep = stepped.transpose(1, 2), timestep
    return latents
