"""Wan 2.1 and 2.2 (arXiv 2503.20314), text to video and image to video.

Video tokens attend to each other, and across to the text. The text is not masked: published models were trained with
512 embeddings of which those beyond the prompt are zero.

Image-to-video models take more channels than they predict: behind the noisy latents a mask of the frames that are
given, and the latents of the first frame alone. Version 2.1 also attends across to the patches of an image encoder.
"""

from typing import cast

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
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

TEMPORAL_FACTOR = 4
"""Frames of one latent frame of the family's VAE."""
IMAGE_TO_VIDEO_TEXT_LENGTH = 512
SMALL_AREA = 480 * 832
"""Pixels of a frame up to which published models are sampled with the smaller shift."""


class WanSelfAttentionProcessor:
    """Self-attention of local video tokens under a scheme of sequence parallelism."""

    def __init__(self, sequence: SequenceParallel) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """(B, S_local, C) to the same; `rotary_emb` is cosine and sine of the local tokens, each (1, S_local, 1, D)."""
        assert encoder_hidden_states is None and attention_mask is None and rotary_emb is not None
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        # Normalized across all heads, before they are told apart.
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
        rotary = (rotary_emb[0].transpose(1, 2), rotary_emb[1].transpose(1, 2))
        query, key = apply_rotary_interleaved(query, rotary), apply_rotary_interleaved(key, rotary)
        out, _ = self.sequence.attention(query, key, value)
        project, dropout = attn.to_out
        return dropout(project(out.transpose(1, 2).flatten(2)))


def resolution_shift(bucket: Bucket) -> float:
    """3 up to 480p and 5 above, as published models are sampled."""
    _, height, width = bucket
    return 3.0 if height * width <= SMALL_AREA else 5.0


class Wan(ModelFamily):
    """Adapter of `WanTransformer3DModel`."""

    name = "wan"
    solvers = {"flow_matching": ("unipc", "euler")}
    flow_schedule = FlowSchedule(shift=resolution_shift)
    uses_prompt_mask = False
    joint_attention = False
    sequence_schemes = ("none", "ulysses", "ring", "usp")
    sequence_plan = SequencePlan(
        shard={"blocks.0": {"hidden_states": 1}}, shard_output={"rope": 1}, join={"proj_out": 1}
    )

    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        if config.path is None:
            config = config.model_copy(update={"config": {"in_channels": latent_channels, **config.config}})
        model = build_diffusers_model(
            WanTransformer3DModel, config, {"out_channels": latent_channels, "text_dim": text_hidden_size}
        )
        settings = model_config(model)
        image_channels = 2 * latent_channels + TEMPORAL_FACTOR
        if settings.in_channels not in (latent_channels, image_channels):
            raise UserError(
                f"model: in_channels is {settings.in_channels}, but latents of this vae make it {latent_channels} for "
                f"text to video or {image_channels} for image to video; use the model's own vae"
            )
        if self.takes_image_embeds(model) and (settings.added_kv_proj_dim is None or not self.takes_first_frame(model)):
            raise UserError(
                f"model: image_dim {settings.image_dim} needs added_kv_proj_dim and in_channels {image_channels}; set "
                "them, or remove it"
            )
        if settings.pos_embed_seq_len is not None:
            raise UserError(
                f"model: pos_embed_seq_len {settings.pos_embed_seq_len} belongs to a model of first and last frames, "
                "which is not supported; set model.path to one of first frames"
            )
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(WanTransformer3DModel, model).blocks)

    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        # Cross-attention needs no exchange, and keeps its own processor.
        for block in cast(WanTransformer3DModel, model).blocks:
            block.attn1.set_processor(WanSelfAttentionProcessor(sequence))

    def takes_first_frame(self, model: nn.Module) -> bool:
        return model_config(model).in_channels != model_config(model).out_channels

    def takes_image_embeds(self, model: nn.Module) -> bool:
        return model_config(model).image_dim is not None

    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        settings = model_config(model)
        check_divisible(latent_shape, settings.out_channels, settings.patch_size)
        if max(self.token_grid(model, latent_shape)) > settings.rope_max_seq_len:
            raise UserError(
                f"latents of {latent_shape[1:]} exceed the {settings.rope_max_seq_len} positions of model.config."
                "rope_max_seq_len; use smaller dataset.buckets"
            )

    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        patch_t, patch_h, patch_w = model_config(model).patch_size
        return latent_shape[1] // patch_t, latent_shape[2] // patch_h, latent_shape[3] // patch_w

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
        self.check_latents(model, tuple(noisy_latents.shape[1:]))
        image_embeds = None
        if self.takes_first_frame(model):
            assert first_frame is not None, "image-to-video models are trained and sampled with first frames"
            noisy_latents = with_first_frame(noisy_latents, first_frame.latents)
        if self.takes_image_embeds(model):
            assert first_frame is not None
            image_embeds = first_frame.embeds
            if prompt_embeds.shape[1] != IMAGE_TO_VIDEO_TEXT_LENGTH:
                raise UserError(
                    f"text_encoder.max_length {prompt_embeds.shape[1]}: image-to-video Wan 2.1 counts on "
                    f"{IMAGE_TO_VIDEO_TEXT_LENGTH} text tokens to tell them from those of the image; set it to that"
                )
        (prediction,) = model(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=prompt_embeds * prompt_mask[..., None],
            encoder_hidden_states_image=image_embeds,
            return_dict=False,
        )
        return prediction


def with_first_frame(noisy_latents: torch.Tensor, first_frame: torch.Tensor) -> torch.Tensor:
    """Channels of image-to-video models: noisy latents (B, C, t, h, w), mask (B, 4, t, h, w), first frame (B, C, t, h,
    w). The mask has a channel for each frame of a latent one; the first latent frame stands for one frame, repeated."""
    B, _, t, h, w = noisy_latents.shape
    mask = noisy_latents.new_zeros(B, TEMPORAL_FACTOR, t, h, w)
    mask[:, :, 0] = 1
    return torch.cat([noisy_latents, mask, first_frame], dim=1)
