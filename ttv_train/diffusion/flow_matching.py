"""Flow matching on straight paths (rectified flow, arXiv 2209.03003; timestep densities of arXiv 2403.03206).

With sigma in (0, 1]: x = (1 - sigma) x_0 + sigma noise, and the model predicts dx / dsigma = noise - x_0. The timestep
it is given is 1000 sigma. Longer and larger videos need noisier timesteps: sigma is shifted to s sigma / (1 + (s - 1)
sigma), in training and in sampling alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from ttv_train.diffusion.base import Bucket, broadcast


@dataclass(frozen=True)
class FlowSchedule:
    """Which timesteps a family is trained and sampled with."""

    shift: Callable[[Bucket], float] = lambda bucket: 1.0
    """s above, for clips of a shape."""
    sampling: Literal["uniform", "logit_normal"] = "logit_normal"
    """Density of the unshifted sigma in training."""
    sigma_range: tuple[float, float] = (0.0, 1.0)
    """Shifted sigmas that are trained; the density is that of all of them, cut off outside."""
    terminal: float | None = None
    """Sigma of the last solver step, to which the others are stretched; `None` leaves them alone."""


class FlowMatching:
    """Rectified flow with continuous timesteps.

    Args:
        schedule: the family's, with what the config changes in it.
        solvers: those that the family can be sampled with, the default first.
    """

    num_train_timesteps = 1000

    def __init__(self, schedule: FlowSchedule, solvers: tuple[str, ...]) -> None:
        self.schedule, self.solvers = schedule, solvers

    def timesteps(self, uniform: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        shift = self.schedule.shift(bucket)
        low, high = self._cumulative(torch.tensor(self.schedule.sigma_range, dtype=torch.float64), shift).tolist()
        sigma = low + (high - low) * (1 - uniform.double())
        if self.schedule.sampling == "logit_normal":
            sigma = torch.special.ndtri(sigma).sigmoid()
        return (self.num_train_timesteps * shift * sigma / (1 + (shift - 1) * sigma)).float()

    def _cumulative(self, sigma: torch.Tensor, shift: float) -> torch.Tensor:
        """Probability of a shifted sigma up to this one."""
        unshifted = sigma / (shift - (shift - 1) * sigma)
        return torch.special.ndtr(unshifted.logit()) if self.schedule.sampling == "logit_normal" else unshifted

    def timestep_at(self, fraction: float) -> float:
        low, high = self.schedule.sigma_range
        return self.num_train_timesteps * (low + fraction * (high - low))

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        sigma = broadcast(timesteps / self.num_train_timesteps, latents)
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return noise - latents

    def loss_weight(self, timesteps: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(timesteps)

    def scheduler(self, solver: str, num_steps: int, device: torch.device, bucket: Bucket) -> Any:
        shift = self.schedule.shift(bucket)
        if solver == "unipc":
            scheduler = UniPCMultistepScheduler(
                self.num_train_timesteps, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
            )
            scheduler.set_timesteps(num_steps, device=device)
        else:
            assert solver == "euler"
            # One step leaves nothing to stretch.
            terminal = self.schedule.terminal if num_steps > 1 else None
            scheduler = FlowMatchEulerDiscreteScheduler(self.num_train_timesteps, shift=shift, shift_terminal=terminal)
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), device=device)
        # Steps are counted; by default they are looked up by a timestep that need not be unique.
        scheduler.set_begin_index(0)
        return scheduler
