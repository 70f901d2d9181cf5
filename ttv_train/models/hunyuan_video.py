"""HunyuanVideo (arXiv 2412.03603), text to video.

Text and video tokens attend together, first with weights of their own (double stream), then with shared ones (single
stream). Text comes from two encoders: token embeddings, and one pooled embedding. The pooled one is the first row of
`prompt_embeds`, zero-padded to the width of the others, so that it is stored, dropped and guided with them.
"""

from typing import cast

import torch
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.models.attention_processor import Attention
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.flow_matching import FlowSchedule
from ttv_train.errors import UserError
from ttv_train.models.base import LatentShape, ModelFamily, check_divisible
from ttv_train.models.diffusers_model import build_diffusers_model, model_config
from ttv_train.models.rotary import apply_rotary_interleaved
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.plan import SequencePlan

GUIDANCE_FACTOR = 1000.0


class HunyuanVideoAttentionProcessor:
    """Joint attention of text and local video tokens under a scheme of sequence parallelism, for both kinds of
    blocks."""

    def __init__(self, sequence: SequenceParallel) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Local video tokens (B, S_local, C) and text tokens (B, L, C), before and after attention.

        Args:
            attention_mask: (B, 1, 1, S + L) bool for video and text: the video part is all True.
            image_rotary_emb: cosine and sine of the local tokens, each (S_local, D).
        """
        query, key, value = self._project(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key = (apply_rotary_interleaved(x, image_rotary_emb) for x in (query, key))
        video_out, text_out = self.sequence.attention(
            query,
            key,
            value,
            text=self._project_text(attn, encoder_hidden_states),
            text_mask=attention_mask[:, 0, 0, -encoder_hidden_states.shape[1] :],
        )
        assert text_out is not None
        video, text = (out.transpose(1, 2).flatten(2) for out in (video_out, text_out))
        if attn.to_out is not None:
            project, dropout = attn.to_out
            video = dropout(project(video))
        if attn.to_add_out is not None:
            text = attn.to_add_out(text)
        return video, text

    @staticmethod
    def _project(attn: Attention, x: torch.Tensor, layers: tuple[nn.Module, ...]) -> TextTensors:
        query, key, value = (layer(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for layer in layers)
        return query, key, value

    def _project_text(self, attn: Attention, x: torch.Tensor) -> TextTensors:
        if attn.add_q_proj is None:
            query, key, value = self._project(attn, x, (attn.to_q, attn.to_k, attn.to_v))
            return attn.norm_q(query), attn.norm_k(key), value
        query, key, value = self._project(attn, x, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        return attn.norm_added_q(query), attn.norm_added_k(key), value


class HunyuanVideo(ModelFamily):
    """Adapter of `HunyuanVideoTransformer3DModel`."""

    name = "hunyuan_video"
    solvers = {"flow_matching": ("euler",)}
    flow_schedule = FlowSchedule(shift=lambda bucket: 7.0)
    uses_prompt_mask = True
    joint_attention = True
    sequence_schemes = ("none", "ulysses", "ring", "usp")
    sequence_plan = SequencePlan(
        shard={"transformer_blocks.0": {"hidden_states": 1}}, shard_output={"rope": 0}, join={"proj_out": 1}
    )

    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        model = build_diffusers_model(
            HunyuanVideoTransformer3DModel,
            config,
            {"in_channels": latent_channels, "out_channels": latent_channels, "text_embed_dim": text_hidden_size},
        )
        settings = model_config(model)
        if settings.image_condition_type is not None:
            raise UserError(
                f"model: image_condition_type {settings.image_condition_type} belongs to image-to-video HunyuanVideo, "
                "whose image condition is not supported; set model.path to a text-to-video model"
            )
        if sum(settings.rope_axes_dim) != settings.attention_head_dim:
            raise UserError(
                f"model.config.rope_axes_dim {list(settings.rope_axes_dim)} must add up to attention_head_dim "
                f"{settings.attention_head_dim}; change either"
            )
        if settings.pooled_projection_dim > text_hidden_size:
            raise UserError(
                f"model.config.pooled_projection_dim {settings.pooled_projection_dim} exceeds the text width "
                f"{text_hidden_size}, but the pooled embedding is stored as a row of the text embeddings; lower it"
            )
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        transformer = cast(HunyuanVideoTransformer3DModel, model)
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]

    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        # The token refiner attends among text tokens only, which every rank holds.
        for block in self.blocks(model):
            cast(Attention, block.attn).set_processor(HunyuanVideoAttentionProcessor(sequence))

    def embeds_guidance(self, model: nn.Module) -> bool:
        return model_config(model).guidance_embeds

    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        settings = model_config(model)
        patch = (settings.patch_size_t, settings.patch_size, settings.patch_size)
        check_divisible(latent_shape, settings.in_channels, patch)

    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        settings = model_config(model)
        patch_t, patch = settings.patch_size_t, settings.patch_size
        return latent_shape[1] // patch_t, latent_shape[2] // patch, latent_shape[3] // patch

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
        """As in `ModelFamily`, with the pooled embedding in the first row of `prompt_embeds`."""
        self.check_latents(model, tuple(noisy_latents.shape[1:]))
        settings = model_config(model)
        pooled, text = prompt_embeds[:, 0, : settings.pooled_projection_dim], prompt_embeds[:, 1:]
        # The model divides by the number of tokens: an empty prompt keeps its first one.
        text_mask = prompt_mask[:, 1:].clone()
        text_mask[:, 0] |= ~text_mask.any(1)
        (prediction,) = model(
            hidden_states=noisy_latents,
            timestep=timesteps,
            encoder_hidden_states=text,
            encoder_attention_mask=text_mask,
            pooled_projections=pooled,
            guidance=torch.full_like(timesteps, GUIDANCE_FACTOR * guidance) if settings.guidance_embeds else None,
            return_dict=False,
        )
        return prediction
