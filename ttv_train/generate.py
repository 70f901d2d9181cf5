"""From embedded prompts to videos in memory: noise, the solver around the model, guidance, the VAE."""

from collections.abc import Sequence

import torch
from torch import nn

from ttv_train.config import SamplingConfig
from ttv_train.diffusion.base import Bucket, Objective
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.solvers import sample
from ttv_train.encoders.vae.base import LatentNormalization, VideoVae
from ttv_train.models.base import ModelFamily
from ttv_train.models.experts import OtherExpert
from ttv_train.parallel.rng import keyed_generator, keyed_normal
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.prompts import PromptTensors


def generate(
    model: nn.Module,
    family: ModelFamily,
    objective: Objective,
    vae: VideoVae,
    normalization: LatentNormalization,
    prompt_embeds: torch.Tensor,
    prompt_mask: torch.Tensor,
    null_prompt: PromptTensors,
    *,
    bucket: Bucket,
    fps: float,
    sampling: SamplingConfig,
    sample_keys: Sequence[str],
    device: torch.device,
    sequence: SequenceParallel,
    other_expert: OtherExpert | None = None,
    first_frame: FirstFrame | None = None,
) -> torch.Tensor:
    """Videos of one bucket. All ranks over which the model is sharded call it together, equally often; the ranks of
    one sequence-parallel group pass the same arguments and get the same videos.

    Args:
        prompt_embeds: (B, L, D), in the type that the model computes in.
        prompt_mask: (B, L) bool.
        null_prompt: embedding (L, D) and mask (L,) of the empty prompt, for families whose models hold none.
        bucket: frames, height and width, in pixels.
        fps: frames per second.
        sample_keys: one per video; with `sampling.seed` it decides the noise.
        other_expert: takes over from `model` at the noise levels for which that is not trained.
        first_frame: of each video, normalized, for image-to-video models.

    Returns:
        RGB uint8 (B, T, H, W, 3) on `device`.

    Raises:
        UserError: the model cannot take this bucket, or the solver cannot take this many steps.
    """
    latents = generate_latents(
        model,
        family,
        objective,
        vae.latent_shape(*bucket),
        prompt_embeds.to(device),
        prompt_mask.to(device),
        (null_prompt[0].to(device), null_prompt[1].to(device)),
        bucket=bucket,
        fps=fps,
        sampling=sampling,
        sample_keys=sample_keys,
        sequence=sequence,
        other_expert=other_expert,
        first_frame=None if first_frame is None else first_frame.to(device, prompt_embeds.dtype),
    )
    with torch.no_grad():
        return to_uint8(vae.decode(normalization.denormalize(latents)))


@torch.no_grad()
def generate_latents(
    model: nn.Module,
    family: ModelFamily,
    objective: Objective,
    latent_shape: tuple[int, int, int, int],
    prompt_embeds: torch.Tensor,
    prompt_mask: torch.Tensor,
    null_prompt: PromptTensors,
    *,
    bucket: Bucket,
    fps: float,
    sampling: SamplingConfig,
    sample_keys: Sequence[str],
    sequence: SequenceParallel,
    other_expert: OtherExpert | None = None,
    first_frame: FirstFrame | None = None,
) -> torch.Tensor:
    """Normalized latents (B, C, t, h, w) float32; arguments as in `generate`, on the model's device.

    Classifier-free guidance (arXiv 2207.12598) in the form of CogVideoX's pipeline, v = v_null + s (v_prompt - v_null)
    in float32, with both predictions from one forward pass of twice the batch. A scale of 1 leaves the empty prompt
    out, and so does a model that takes the scale as an input.
    """
    channels, num_frames, *size = latent_shape
    num_padding = family.num_padding_frames(model, num_frames)
    shape = (channels, num_frames + num_padding, *size)
    family.check_latents(model, shape)
    device, dtype = prompt_embeds.device, prompt_embeds.dtype
    noise = torch.stack([keyed_normal(shape, sampling.seed, "sampling noise", key) for key in sample_keys]).to(device)
    scales = [sampling.guidance_scale, *([] if other_expert is None else [other_expert.guidance_scale])]
    guided = max(scales) > 1 and not family.embeds_guidance(model)
    if guided:
        null_embeds, null_mask = null_prompt
        own_null_embeds = family.null_prompt_of_length(model, prompt_embeds.shape[1])
        if own_null_embeds is not None:
            null_embeds, null_mask = own_null_embeds, prompt_mask
        prompt_embeds = torch.cat([null_embeds.to(dtype).expand_as(prompt_embeds), prompt_embeds])
        prompt_mask = torch.cat([null_mask.expand_as(prompt_mask), prompt_mask])
        first_frame = None if first_frame is None else first_frame.twice()
    rates = torch.full((len(prompt_embeds),), fps, dtype=torch.float32, device=device)

    def denoise(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        if guided:
            latents, timesteps = torch.cat([latents, latents]), torch.cat([timesteps, timesteps])
        expert, scale = model, sampling.guidance_scale
        if other_expert is not None and other_expert.takes(float(timesteps[0])):
            expert, scale = other_expert.model, other_expert.guidance_scale
        prediction = family.predict(
            expert,
            latents.to(dtype),
            timesteps,
            prompt_embeds,
            prompt_mask,
            fps=rates,
            height=bucket[1],
            width=bucket[2],
            guidance=scale,
            first_frame=first_frame,
        ).float()
        if not guided:
            return prediction
        without_prompt, with_prompt = prediction.chunk(2)
        return without_prompt + scale * (with_prompt - without_prompt)

    was_training = model.training
    model.eval()
    with sequence.gathering():
        latents = sample(
            denoise,
            objective,
            noise,
            sampling.num_steps,
            bucket=bucket,
            solver=sampling.solver,
            generators=[solver_generator(sampling.seed, key) for key in sample_keys],
        )
    model.train(was_training)
    return latents[:, :, num_padding:]


def solver_generator(seed: int, key: str) -> torch.Generator:
    """What a solver that draws noise on its way draws it from: on the CPU, the same on every rank and device."""
    return torch.Generator().manual_seed(int(keyed_generator(seed, "solver noise", key).integers(2**63)))


def to_uint8(video: torch.Tensor) -> torch.Tensor:
    """(B, 3, T, H, W) in [-1, 1] to uint8 (B, T, H, W, 3); what lies outside is clamped."""
    levels = (video.float() + 1) * 127.5
    return levels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1)
