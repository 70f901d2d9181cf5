"""CogVideoX (arXiv 2408.06072), versions 1.0 and 1.5, text to video.

Text and video tokens attend together. Positions are rotary (5B and 1.5) or added to the patches (2B). Version 1.5
patches several latent frames together (`patch_size_t`).
"""

from typing import Any, cast

import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.flow_matching import FlowSchedule
from ttv_train.errors import UserError
from ttv_train.models.base import LatentShape, ModelFamily, check_channels
from ttv_train.models.diffusers_model import build_diffusers_model, model_config
from ttv_train.models.rotary import apply_rotary_interleaved
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan


class CogVideoXAttentionProcessor:
    """Joint attention of text and local video tokens under a scheme of sequence parallelism."""

    def __init__(self, sequence: SequenceParallel) -> None:
        self.sequence = sequence

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Local video tokens (B, S_local, C) and text tokens (B, L, C), before and after attention.

        Args:
            image_rotary_emb: cosine and sine of the local tokens, each (S_local, D).
        """
        assert attention_mask is None, "CogVideoX attends to every text token"
        query, key, value = self._project(attn, hidden_states)
        if image_rotary_emb is not None:
            query = apply_rotary_interleaved(query, image_rotary_emb)
            key = apply_rotary_interleaved(key, image_rotary_emb)
        text = self._project(attn, encoder_hidden_states)
        video_out, text_out = self.sequence.attention(query, key, value, text=text)
        assert text_out is not None
        return self._output(attn, video_out), self._output(attn, text_out)

    @staticmethod
    def _project(attn: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (
            project(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        if attn.norm_q is not None:
            query, key = attn.norm_q(query), attn.norm_k(key)
        return query, key, value

    @staticmethod
    def _output(attn: Attention, x: torch.Tensor) -> torch.Tensor:
        project, dropout = attn.to_out
        return dropout(project(x.transpose(1, 2).flatten(2)))


class CogVideoX(ModelFamily):
    """Adapter of `CogVideoXTransformer3DModel`."""

    name = "cogvideox"
    solvers = {"velocity": ("ddim", "dpm"), "flow_matching": ("euler",)}
    flow_schedule = FlowSchedule(sampling="uniform")
    uses_prompt_mask = False
    joint_attention = True
    sequence_schemes = ("none", "ulysses", "ring", "usp")
    sequence_plan = SequencePlan(
        shard={"": {"image_rotary_emb": 0}, "transformer_blocks.0": {"hidden_states": 1}},
        join={"proj_out": 1},
    )

    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        model = build_diffusers_model(
            CogVideoXTransformer3DModel,
            config,
            {"in_channels": latent_channels, "out_channels": latent_channels, "text_embed_dim": text_hidden_size},
        )
        settings = model_config(model)
        if settings.ofs_embed_dim is not None:
            raise UserError(
                f"model: ofs_embed_dim {settings.ofs_embed_dim} belongs to image-to-video CogVideoX, whose image "
                "condition is not supported; set model.path to a text-to-video model"
            )
        if settings.use_rotary_positional_embeddings and settings.attention_head_dim % 16:
            raise UserError(
                f"model.config.attention_head_dim {settings.attention_head_dim} cannot be divided into rotary "
                "positions of time, height and width; make it a multiple of 16"
            )
        if settings.patch_size_t is not None and not settings.use_rotary_positional_embeddings:
            raise UserError(
                f"model.config.patch_size_t {settings.patch_size_t} needs rotary positions; set "
                "model.config.use_rotary_positional_embeddings: true"
            )
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(CogVideoXTransformer3DModel, model).transformer_blocks)

    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        cast(CogVideoXTransformer3DModel, model).set_attn_processor(CogVideoXAttentionProcessor(sequence))

    def num_padding_frames(self, model: nn.Module, num_latent_frames: int) -> int:
        return -num_latent_frames % (model_config(model).patch_size_t or 1)

    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        settings = model_config(model)
        _, frames, height, width = latent_shape
        check_channels(latent_shape, settings.in_channels)
        if self.num_padding_frames(model, frames):
            raise UserError(
                f"latents of {frames} frames are not a multiple of the model's patch_size_t {settings.patch_size_t}; "
                "change dataset.buckets"
            )
        for dimension, size in (("height", height), ("width", width)):
            if size % settings.patch_size:
                raise UserError(
                    f"latents of {dimension} {size} are not a multiple of the model's patch_size "
                    f"{settings.patch_size}; change dataset.buckets"
                )
            largest = settings[f"sample_{dimension}"]
            if settings.patch_size_t is not None and size > largest:
                raise UserError(
                    f"latents of {dimension} {size} exceed the model's sample_{dimension} {largest}, beyond which "
                    "CogVideoX 1.5 has no positions; use smaller dataset.buckets"
                )
            if settings.use_learned_positional_embeddings and size != largest:
                raise UserError(
                    f"latents of {dimension} {size} differ from sample_{dimension} {largest}, the only one for which "
                    "the model has learned positions; change dataset.buckets"
                )

    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        settings = model_config(model)
        _, frames, height, width = latent_shape
        patch_t = settings.patch_size_t or 1
        return frames // patch_t, height // settings.patch_size, width // settings.patch_size

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
        settings = model_config(model)
        latent_shape = tuple(noisy_latents.shape[1:])
        self.check_latents(model, latent_shape)
        if not settings.use_rotary_positional_embeddings and prompt_embeds.shape[1] != settings.max_text_seq_length:
            raise UserError(
                f"text_encoder.max_length {prompt_embeds.shape[1]} differs from the model's max_text_seq_length "
                f"{settings.max_text_seq_length}; set model.config.max_text_seq_length or text_encoder.max_length"
            )
        (prediction,) = model(
            hidden_states=noisy_latents.transpose(1, 2),
            encoder_hidden_states=prompt_embeds,
            timestep=timesteps,
            image_rotary_emb=rotary_table(settings, self.token_grid(model, latent_shape), noisy_latents.device),
            return_dict=False,
        )
        return prediction.transpose(1, 2)


def rotary_table(
    settings: Any, token_grid: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosine and sine of all video tokens, each (S, D) float32; None when the model adds its positions instead.

    As the family's pipeline computes them: version 1.0 maps the grid into that of the training resolution, version 1.5
    takes the first rows and columns of it.
    """
    if not settings.use_rotary_positional_embeddings:
        return None
    frames, rows, columns = token_grid
    base_rows, base_columns = (
        settings.sample_height // settings.patch_size,
        settings.sample_width // settings.patch_size,
    )
    if settings.patch_size_t is None:
        crop = get_resize_crop_region_for_grid((rows, columns), base_columns, base_rows)
        placement: dict[str, Any] = {"crops_coords": crop}
    else:
        placement = {"crops_coords": None, "grid_type": "slice", "max_size": (base_rows, base_columns)}
    return get_3d_rotary_pos_embed(
        embed_dim=settings.attention_head_dim,
        grid_size=(rows, columns),
        temporal_size=frames,
        device=device,
        **placement,
    )
