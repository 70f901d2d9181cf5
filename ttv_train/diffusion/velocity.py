"""v-prediction (arXiv 2202.00512) on CogVideoX's discrete schedule.

Betas are linear in their square roots from 0.00085 to 0.012 over 1000 steps; the signal-to-noise ratio is divided by
`snr_shift_scale`; then the last step is made pure noise (arXiv 2305.08891, algorithm 1). With a = sqrt(alpha_bar_t) and
b = sqrt(1 - alpha_bar_t): x_t = a x_0 + b noise, v = a noise - b x_0. The family's training loss, the error of x_0
weighted by 1 / (1 - alpha_bar_t), is the plain error of v, because x_0 - x_0' = b (v' - v).
"""

from typing import Any

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from ttv_train.diffusion.base import Bucket, broadcast

SCHEDULERS = {"ddim": CogVideoXDDIMScheduler, "dpm": CogVideoXDPMScheduler}


class Velocity:
    """v-prediction with integer timesteps, drawn uniformly.

    Args:
        snr_shift_scale: 3.0 for CogVideoX-2B, 1.0 for 5B and 1.5.
        solvers: those that the family can be sampled with, the default first.
    """

    num_train_timesteps = 1000

    def __init__(self, snr_shift_scale: float, solvers: tuple[str, ...]) -> None:
        self.solvers = solvers
        self.scheduler_config: dict[str, Any] = {
            "num_train_timesteps": self.num_train_timesteps,
            "beta_schedule": "scaled_linear",
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "snr_shift_scale": snr_shift_scale,
            "rescale_betas_zero_snr": True,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
            "clip_sample": False,
        }
        alphas_cumprod = CogVideoXDDIMScheduler(**self.scheduler_config).alphas_cumprod
        self._signal, self._deviation = alphas_cumprod.sqrt().float(), (1 - alphas_cumprod).sqrt().float()

    def timesteps(self, uniform: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        return (uniform.double() * self.num_train_timesteps).floor().float()

    def timestep_at(self, fraction: float) -> float:
        return float(round(fraction * (self.num_train_timesteps - 1)))

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        signal, deviation = self._signal_and_deviation(timesteps, latents)
        return signal * latents + deviation * noise

    def target(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        signal, deviation = self._signal_and_deviation(timesteps, latents)
        return signal * noise - deviation * latents

    def loss_weight(self, timesteps: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(timesteps)

    def scheduler(self, solver: str, num_steps: int, device: torch.device, bucket: Bucket) -> Any:
        scheduler = SCHEDULERS[solver](**self.scheduler_config)
        scheduler.set_timesteps(num_steps, device=device)
        return scheduler

    def _signal_and_deviation(
        self, timesteps: torch.Tensor, latents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = timesteps.long()
        signal, deviation = (table.to(index.device)[index].to(latents) for table in (self._signal, self._deviation))
        return broadcast(signal, latents), broadcast(deviation, latents)
