"""One optimizer step: micro-batches, loss, backward, finite gate, clip, AdamW, EMA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ttv_train.config import OptimizerConfig
from ttv_train.data.collate import Batch
from ttv_train.diffusion.base import Objective
from ttv_train.ema import Ema
from ttv_train.models.base import ModelFamily
from ttv_train.monitor.step_timer import StepTimer
from ttv_train.parallel.fsdp import set_gradient_sync
from ttv_train.parallel.mesh import ParallelMesh
from ttv_train.parallel.sequence.base import SequenceParallel


@dataclass
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over every latent element of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True when the loss or the norm was not finite and no weight changed."""
    stop_requested: bool
    """True when any rank was asked to stop."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    final = config.final_learning_rate_ratio
    return config.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_sum(
    model: nn.Module,
    family: ModelFamily,
    objective: Objective,
    sequence: SequenceParallel,
    batch: Batch,
    timesteps: torch.Tensor,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Weighted squared error summed over the latent elements that this rank owns, a float32 scalar with gradient.

    Summed over the ranks of a sequence-parallel group it is the error of the whole batch: each rank's prediction holds
    values at its own tokens only, and the mask leaves out the others, so predictions are never gathered.

    Args:
        timesteps: (B,) float32.
    """
    latents, noise = batch.latents.to(device), batch.noise.to(device)
    timesteps = timesteps.to(device)
    noisy = objective.add_noise(latents, noise, timesteps)
    prediction = family.predict(
        model,
        noisy.to(compute_dtype),
        timesteps,
        batch.prompt_embeds.to(device, compute_dtype),
        batch.prompt_mask.to(device),
        fps=batch.fps.to(device),
        height=batch.bucket[1],
        width=batch.bucket[2],
        first_frame=None if batch.first_frame is None else batch.first_frame.to(device, compute_dtype),
    )
    error = (prediction.float() - objective.target(latents, noise, timesteps)).square()
    weight = objective.loss_weight(timesteps).view(-1, 1, 1, 1, 1)
    owned = family.owned_tokens(sequence, family.token_grid(model, tuple(latents.shape[1:])))
    return (error * weight * latents_of_tokens(owned, tuple(latents.shape[2:])).to(device)).sum()


def latents_of_tokens(owned_tokens: torch.Tensor, latent_grid: tuple[int, ...]) -> torch.Tensor:
    """Which latent elements belong to a set of tokens: float32 (t, h, w), 1 where they do and 0 elsewhere.

    Args:
        owned_tokens: bool (t', h', w'). Each token covers a patch of latents; patches at the far edges may reach beyond
            the latents.
        latent_grid: latents along frames, height and width.
    """
    mask = owned_tokens.float()
    for dim, latents in enumerate(latent_grid):
        mask = mask.repeat_interleave(-(-latents // mask.shape[dim]), dim).narrow(dim, 0, latents)
    return mask


@dataclass
class TrainStep:
    """The parts that a step touches; calling it with a step's micro-batches performs the step."""

    model: nn.Module
    family: ModelFamily
    objective: Objective
    sequence: SequenceParallel
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    mesh: ParallelMesh
    config: OptimizerConfig
    total_steps: int
    compute_dtype: torch.dtype
    timer: StepTimer

    def __call__(self, batches: Sequence[Batch], step: int, stop_requested: bool = False) -> StepResult:
        """Performs optimizer step `step`. All ranks call it together, with equally many micro-batches."""
        elements = self.mesh.data_degree * sum(batch.latents.numel() for batch in batches)
        local_loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for position, batch in enumerate(batches):
            set_gradient_sync(self.model, position == len(batches) - 1)
            with self.timer.phase("forward"):
                loss = loss_sum(
                    self.model,
                    self.family,
                    self.objective,
                    self.sequence,
                    batch,
                    self.objective.timesteps(batch.uniform, batch.bucket),
                    self.mesh.device,
                    self.compute_dtype,
                )
            with self.timer.phase("backward"):
                (loss / elements).backward()
            local_loss += loss.detach().double()
        with self.timer.phase("optimizer"):
            return self._update(local_loss / elements, step, stop_requested)

    def _update(self, local_loss: torch.Tensor, step: int, stop_requested: bool) -> StepResult:
        # Every rank decides from the same reduced numbers, so either all of them step or none does.
        totals = torch.stack([local_loss, local_loss.new_tensor(float(stop_requested))])
        dist.all_reduce(totals)
        loss = float(totals[0])
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        grad_norm = float(norm)
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not skipped:
            nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.config, step, self.total_steps)
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(step)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, grad_norm, skipped, bool(totals[1] > 0))
