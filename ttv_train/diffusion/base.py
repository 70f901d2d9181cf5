"""What an objective is: how latents are noised, what the model should predict, and how its predictions are sampled.

Timesteps are float32 of shape (B,) in [0, 1000] up to the model's embedding; bfloat16 would keep 507 of 1000 values.
"""

from typing import Any, Protocol

import torch

Bucket = tuple[int, int, int]
"""Frames, height and width of a clip, in pixels."""


class Objective(Protocol):
    """One objective with its settings."""

    num_train_timesteps: int
    """Timestep of pure noise, or number of discrete timesteps."""
    solvers: tuple[str, ...]
    """Solvers that can sample a model trained with it, the default first."""

    def timesteps(self, uniform: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Training timesteps from uniform draws, by the inverse of their distribution function.

        Args:
            uniform: (B,) float32 or float64 in [0, 1).
            bucket: shape of the clips, by which some families shift timesteps.

        Returns:
            (B,) float32.
        """
        ...

    def timestep_at(self, fraction: float) -> float:
        """The timestep at a fraction in [0, 1] of what is trained: 0 for least noise, 1 for most."""
        ...

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Noisy latents (B, C, t, h, w) at timesteps (B,)."""
        ...

    def target(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """What the model should predict, (B, C, t, h, w)."""
        ...

    def loss_weight(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Factor of each sample's squared error, (B,) float32."""
        ...

    def scheduler(self, solver: str, num_steps: int, device: torch.device, bucket: Bucket) -> Any:
        """The solver's scheduler of diffusers, with its timesteps set, noisiest first."""
        ...


def broadcast(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Per-sample values (B,) with as many dimensions as `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))
