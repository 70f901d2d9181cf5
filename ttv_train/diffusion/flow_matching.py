"""Flow matching on straight paths (rectified flow, arXiv 2209.03003; timestep densities of arXiv 2403.03206).

With sigma in (0, 1]: x = (1 - sigma) x_0 + sigma noise, and the model predicts dx / dsigma = noise - x_0. The timestep
it is given is 1000 sigma. Longer and larger videos need noisier timesteps: sigma is shifted to s sigma / (1 + (s - 1)
sigma), in training and in sampling alike.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ttv_train.diffusion.base import Bucket, broadcast


class FlowMatching:
    """Rectified flow with continuous timesteps.

    Args:
        shift: s above, or a function of a clip's shape that gives it.
        sampling: density of the unshifted sigma in training.
        solvers: those that the family can be sampled with, the default first.
    """

    num_train_timesteps = 1000

    def __init__(
        self,
        shift: float | Callable[[Bucket], float],
        sampling: Literal["uniform", "logit_normal"],
        solvers: tuple[str, ...],
    ) -> None:
        self._shift, self.sampling, self.solvers = shift, sampling, solvers

    def shift(self, bucket: Bucket | None) -> float:
        """The shift s of clips of this shape.

        Raises:
            ValueError: s depends on the shape and none is given.
        """
        if not callable(self._shift):
            return self._shift
        if bucket is None:
            raise ValueError("this family shifts timesteps by the shape of the clip: pass its bucket")
        return self._shift(bucket)

    def timesteps(self, uniform: torch.Tensor, bucket: Bucket | None = None) -> torch.Tensor:
        sigma = 1 - uniform.double()
        if self.sampling == "logit_normal":
            sigma = torch.special.ndtri(sigma).sigmoid()
        shift = self.shift(bucket)
        return (self.num_train_timesteps * shift * sigma / (1 + (shift - 1) * sigma)).float()

    def timestep_at(self, fraction: float) -> float:
        return self.num_train_timesteps * fraction

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        sigma = broadcast(timesteps / self.num_train_timesteps, latents)
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return noise - latents

    def loss_weight(self, timesteps: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(timesteps)

    def scheduler(self, solver: str, num_steps: int, device: torch.device, bucket: Bucket | None = None) -> Any:
        assert solver == "euler"
        scheduler = FlowMatchEulerDiscreteScheduler(self.num_train_timesteps, shift=self.shift(bucket))
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), device=device)
        return scheduler
