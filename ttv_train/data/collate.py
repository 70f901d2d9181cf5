"""Samples to a batch of tensors, with everything random drawn here by key.

Each draw is keyed by (seed, purpose, sample, step, slot), where the slot is the sample's place in the global batch. A
batch is therefore the same whichever rank collates it and however the global batch is cut into micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ttv_train.data.shards import LatentNormalization, LatentSample
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.parallel.rng import fill_normal, keyed_uniform


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
    first_frame: FirstFrame | None = None
    """For image-to-video models; normalized."""

    @property
    def num_frames(self) -> int:
        return len(self.keys) * self.bucket[0]


@dataclass(frozen=True)
class Collator:
    """Makes batches from samples.

    Args:
        seed: the run's seed.
        normalization: applied once to the stored latents.
        null_prompt: embedding (L, D) and mask (L,) of the empty prompt, which dropped captions get. A mask of None
            keeps the caption's.
        caption_dropout: probability of that.
        max_text_tokens: every prompt is padded to this length, so that a sample's result does not depend on the
            captions it shares a batch with.
        num_padding_frames: from the number of latent frames of a clip to how many copies of its first one are put in
            front, for families that patch several frames together.
        uses_first_frame: whether the model takes first frames, which the samples then have.
    """

    seed: int
    normalization: LatentNormalization
    null_prompt: tuple[torch.Tensor, torch.Tensor | None]
    caption_dropout: float
    max_text_tokens: int
    num_padding_frames: Callable[[int], int]
    uses_first_frame: bool = False

    def __call__(self, samples: Sequence[LatentSample], step: int, slots: Sequence[int]) -> Batch:
        """Batches `samples`, which stand at `slots` of the global batch of optimizer step `step`."""
        C, t, h, w = samples[0].mean.shape
        num_padding = self.num_padding_frames(t)
        latents = torch.empty(len(samples), C, num_padding + t, h, w)
        noise = torch.empty_like(latents)
        uniform, prompts = [], []
        for row, (sample, slot) in enumerate(zip(samples, slots, strict=True)):
            place = (sample.entry.key, step, slot)
            self._write_latents(latents[row, :, num_padding:], sample, place)
            latents[row, :, :num_padding] = latents[row, :, num_padding : num_padding + 1]
            fill_normal(noise[row], self.seed, "noise", *place)
            uniform.append(keyed_uniform(self.seed, "timestep", *place))
            prompts.append(self._prompt(sample, place))
        embeds, mask = pad_prompts(prompts, self.max_text_tokens)
        return Batch(
            keys=[sample.entry.key for sample in samples],
            bucket=samples[0].entry.bucket,
            fps=torch.tensor([sample.entry.fps for sample in samples], dtype=torch.float32),
            latents=latents,
            noise=noise,
            uniform=torch.tensor(uniform, dtype=torch.float64),
            prompt_embeds=embeds,
            prompt_mask=mask,
            first_frame=self._first_frames(samples) if self.uses_first_frame else None,
        )

    def _write_latents(self, out: torch.Tensor, sample: LatentSample, place: tuple[str, int, int]) -> None:
        """Sets (C, t, h, w) to a draw from the posterior, normalized."""
        out.copy_(sample.mean)
        if sample.logvar is not None:
            draw = torch.empty(out.shape)
            fill_normal(draw, self.seed, "posterior", *place)
            out += torch.exp(0.5 * sample.logvar.float()) * draw
        self.normalization.normalize_(out[None])

    def _first_frames(self, samples: Sequence[LatentSample]) -> FirstFrame:
        return normalized_first_frames([sample.first_frame for sample in samples], self.normalization)

    def _prompt(self, sample: LatentSample, place: tuple[str, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        if keyed_uniform(self.seed, "caption dropout", *place) >= self.caption_dropout:
            return sample.prompt_embeds, sample.prompt_mask
        embeds, mask = self.null_prompt
        return embeds, sample.prompt_mask if mask is None else mask


def normalized_first_frames(
    first_frames: Sequence[FirstFrame | None], normalization: LatentNormalization
) -> FirstFrame:
    """A float32 batch of stored first frames, as the diffusion model sees them."""
    frames = [frame for frame in first_frames if frame is not None]
    assert len(frames) == len(first_frames), "the config's fingerprint is that of a dataset with first frames"
    latents = normalization.normalize(torch.stack([frame.latents.float() for frame in frames]))
    embeds = [frame.embeds.float() for frame in frames if frame.embeds is not None]
    return FirstFrame(latents, torch.stack(embeds) if embeds else None)


def pad_prompts(prompts: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stacks embeddings (L_i, D) and masks (L_i,) into (B, length, D) float32 and (B, length) bool, zero-padded."""
    width = prompts[0][0].shape[-1]
    embeds = torch.zeros(len(prompts), length, width)
    mask = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (prompt_embeds, prompt_mask) in enumerate(prompts):
        embeds[row, : len(prompt_embeds)] = prompt_embeds.float()
        mask[row, : len(prompt_mask)] = prompt_mask
    return embeds, mask
