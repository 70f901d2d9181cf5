"""LTX-Video (arXiv 2501.00103), text to video.

A strong VAE makes tokens of single latents; positions are seconds and pixels, so they depend on the frame rate.
"""

import math
from typing import cast

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx import LTXAttention
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.diffusion.base import Bucket
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.flow_matching import FlowSchedule
from ttv_train.errors import UserError
from ttv_train.models.base import LatentShape, ModelFamily, check_divisible
from ttv_train.models.diffusers_model import build_diffusers_model, model_config
from ttv_train.models.rotary import apply_rotary_interleaved
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan

TEMPORAL_FACTOR, SPATIAL_FACTOR = 8, 32
"""Frames, rows and columns of pixels of one latent of the family's VAE."""


class LTXVideoSelfAttentionProcessor:
    """Self-attention of local video tokens under a scheme of sequence parallelism."""

    def __init__(self, sequence: SequenceParallel) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: LTXAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """(B, S_local, C) to the same.

        Args:
            image_rotary_emb: cosine and sine of the local tokens, each (B, S_local, C): heads have their own angles.
        """
        assert encoder_hidden_states is None and attention_mask is None and image_rotary_emb is not None
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        # Normalized across all heads, before they are told apart.
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value, cos, sin = (
            x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value, *image_rotary_emb)
        )
        query, key = apply_rotary_interleaved(query, (cos, sin)), apply_rotary_interleaved(key, (cos, sin))
        out, _ = self.sequence.attention(query, key, value)
        project, dropout = attn.to_out
        return dropout(project(out.transpose(1, 2).flatten(2)))


def token_count_shift(bucket: Bucket) -> float:
    """exp(mu), with mu linear in the number of tokens through (1024, 0.95) and (4096, 2.05)."""
    num_frames, height, width = bucket
    tokens = ((num_frames - 1) // TEMPORAL_FACTOR + 1) * (height // SPATIAL_FACTOR) * (width // SPATIAL_FACTOR)
    return math.exp(0.95 + (tokens - 1024) * (2.05 - 0.95) / (4096 - 1024))


class LTXVideo(ModelFamily):
    """Adapter of `LTXVideoTransformer3DModel`."""

    name = "ltx_video"
    solvers = {"flow_matching": ("euler",)}
    flow_schedule = FlowSchedule(shift=token_count_shift, terminal=0.1)
    uses_prompt_mask = True
    joint_attention = False
    sequence_schemes = ("none", "ulysses", "ring", "usp")
    sequence_plan = SequencePlan(
        shard={"transformer_blocks.0": {"hidden_states": 1}}, shard_output={"rope": 1}, join={"proj_out": 1}
    )

    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        model = build_diffusers_model(
            LTXVideoTransformer3DModel,
            config,
            {"in_channels": latent_channels, "out_channels": latent_channels, "caption_channels": text_hidden_size},
        )
        settings = model_config(model)
        if (settings.patch_size, settings.patch_size_t) != (1, 1):
            raise UserError(
                f"model.config: patch_size {settings.patch_size} and patch_size_t {settings.patch_size_t} of LTX-Video "
                "must be 1; remove them"
            )
        hidden_size = settings.num_attention_heads * settings.attention_head_dim
        if settings.cross_attention_dim != hidden_size:
            raise UserError(
                f"model.config.cross_attention_dim {settings.cross_attention_dim} must be num_attention_heads * "
                f"attention_head_dim = {hidden_size}; set it to that"
            )
        if settings.attention_head_dim % 2:
            raise UserError(f"model.config.attention_head_dim {settings.attention_head_dim} is odd; make it even")
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(LTXVideoTransformer3DModel, model).transformer_blocks)

    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        # Cross-attention needs no exchange, and keeps its own processor.
        for block in cast(LTXVideoTransformer3DModel, model).transformer_blocks:
            block.attn1.set_processor(LTXVideoSelfAttentionProcessor(sequence))

    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        check_divisible(latent_shape, model_config(model).in_channels, (1, 1, 1))

    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        return latent_shape[1], latent_shape[2], latent_shape[3]

    def predict(
        self,
        model: nn.Module,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        prompt_mask: torch.Tensor,
        *,
        fps: torch.Tensor,
        height: int,
        width: int,
        guidance: float = 1.0,
        first_frame: FirstFrame | None = None,
    ) -> torch.Tensor:
        latent_grid = noisy_latents.shape[2:]
        self.check_latents(model, tuple(noisy_latents.shape[1:]))
        seconds = (TEMPORAL_FACTOR / fps).view(-1, 1, 1, 1, 1)
        (prediction,) = model(
            hidden_states=noisy_latents.flatten(2).transpose(1, 2),
            encoder_hidden_states=prompt_embeds,
            timestep=timesteps,
            encoder_attention_mask=prompt_mask,
            num_frames=latent_grid[0],
            height=latent_grid[1],
            width=latent_grid[2],
            rope_interpolation_scale=(seconds, height / latent_grid[1], width / latent_grid[2]),
            return_dict=False,
        )
        return prediction.transpose(1, 2).unflatten(2, latent_grid)
