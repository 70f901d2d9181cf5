"""Samples to a batch of tensors, with everything random drawn here by key.

Each draw is keyed by (seed, purpose, sample, step, slot), where the slot is the sample's place in the global batch. A
batch is therefore the same whichever rank collates it and however the global batch is cut into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttv_train.data.shards import LatentNormalization, LatentSample
from ttv_train.parallel.rng import keyed_normal, keyed_uniform


@dataclass
class Batch:
    """One micro-batch of one bucket, on the CPU, float32 unless said otherwise."""

    keys: list[str]
    bucket: tuple[int, int, int]
    """Frames, height and width of the clips, in pixels."""
    fps: torch.Tensor
    """(B,)"""
    latents: torch.Tensor
    """Normalized latents (B, C, t, h, w)."""
    noise: torch.Tensor
    """Standard normal (B, C, t, h, w)."""
    uniform: torch.Tensor
    """(B,) float64 in [0, 1), from which the objective makes timesteps."""
    prompt_embeds: torch.Tensor
    """(B, L, D)"""
    prompt_mask: torch.Tensor
    """(B, L) bool, True where there is a token."""

    @property
    def num_frames(self) -> int:
        return len(self.keys) * self.bucket[0]


@dataclass(frozen=True)
class Collator:
    """Makes batches from samples.

    Args:
        seed: the run's seed.
        normalization: applied once to the stored latents.
        null_prompt: embedding (L, D) and mask (L,) of the empty prompt, which dropped captions get.
        caption_dropout: probability of that.
        max_text_tokens: every prompt is padded to this length, so that a sample's result does not depend on the
            captions it shares a batch with.
    """

    seed: int
    normalization: LatentNormalization
    null_prompt: tuple[torch.Tensor, torch.Tensor]
    caption_dropout: float
    max_text_tokens: int

    def __call__(self, samples: Sequence[LatentSample], step: int, slots: Sequence[int]) -> Batch:
        """Batches `samples`, which stand at `slots` of the global batch of optimizer step `step`."""
        latents, noise, uniform, prompts = [], [], [], []
        for sample, slot in zip(samples, slots, strict=True):
            place = (sample.entry.key, step, slot)
            value = sample.mean.float()
            shape = tuple(value.shape)
            if sample.logvar is not None:
                deviation = torch.exp(0.5 * sample.logvar.float())
                value = value + deviation * keyed_normal(shape, self.seed, "posterior", *place)
            latents.append(self.normalization.normalize(value[None])[0])
            noise.append(keyed_normal(shape, self.seed, "noise", *place))
            uniform.append(keyed_uniform(self.seed, "timestep", *place))
            dropped = keyed_uniform(self.seed, "caption dropout", *place) < self.caption_dropout
            prompts.append(self.null_prompt if dropped else (sample.prompt_embeds, sample.prompt_mask))
        embeds, mask = pad_prompts(prompts, self.max_text_tokens)
        return Batch(
            keys=[sample.entry.key for sample in samples],
            bucket=samples[0].entry.bucket,
            fps=torch.tensor([sample.entry.fps for sample in samples], dtype=torch.float32),
            latents=torch.stack(latents),
            noise=torch.stack(noise),
            uniform=torch.tensor(uniform, dtype=torch.float64),
            prompt_embeds=embeds,
            prompt_mask=mask,
        )


def pad_prompts(prompts: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stacks embeddings (L_i, D) and masks (L_i,) into (B, length, D) float32 and (B, length) bool, zero-padded."""
    width = prompts[0][0].shape[-1]
    embeds = torch.zeros(len(prompts), length, width)
    mask = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (prompt_embeds, prompt_mask) in enumerate(prompts):
        embeds[row, : len(prompt_embeds)] = prompt_embeds.float()
        mask[row, : len(prompt_mask)] = prompt_mask
    return embeds, mask
