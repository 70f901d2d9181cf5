"""The STDiT3 transformer of Open-Sora 1.2 (arXiv 2412.20404): spatial and temporal blocks in turn.

It loads the published weights: parameters have their names and shapes, and `forward` takes their arguments.
"""

import math
from typing import Any, cast

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import nn

from ttv_train.models.stdit3_layers import (
    Block,
    CaptionEmbedder,
    FinalLayer,
    PatchEmbed3D,
    RotaryTime,
    ScalarEmbedder,
    spatial_positions,
)


class STDiT3(ModelMixin, ConfigMixin):
    """Spatial-temporal diffusion transformer.

    Args:
        input_sq_size: side in pixels of the square videos at which positions are not scaled.
        in_channels: latent channels.
        patch_size: latent frames, rows and columns of one token.
        hidden_size: channels of a token, a multiple of 4 and of `num_heads`.
        depth: pairs of a spatial and a temporal block.
        num_heads: attention heads.
        mlp_ratio: channels inside an MLP over `hidden_size`.
        pred_sigma: whether the output has as many channels again, which rectified flow leaves unused.
        caption_channels: width of text embeddings.
        model_max_length: text tokens of the embedding that stands for no caption.
        qk_norm: whether queries and keys are normalized.
    """

    _no_split_modules = ["Block"]

    @register_to_config
    def __init__(
        self,
        input_sq_size: int = 512,
        in_channels: int = 4,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        pred_sigma: bool = True,
        caption_channels: int = 4096,
        model_max_length: int = 300,
        qk_norm: bool = True,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or hidden_size // num_heads % 2 or hidden_size % 4:
            raise ValueError(f"hidden_size {hidden_size} must be a multiple of 4 and of twice num_heads {num_heads}")
        patch = (patch_size[0], patch_size[1], patch_size[2])
        out_channels = in_channels * 2 if pred_sigma else in_channels
        self.rope = RotaryTime(hidden_size // num_heads)
        self.x_embedder = PatchEmbed3D(patch, in_channels, hidden_size)
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        self.spatial_blocks, self.temporal_blocks = (
            nn.ModuleList(Block(hidden_size, num_heads, mlp_ratio, qk_norm, temporal) for _ in range(depth))
            for temporal in (False, True)
        )
        self.final_layer = FinalLayer(hidden_size, math.prod(patch) * out_channels)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Frame rates and temporal blocks begin without effect: training starts as that of an image model.
        self.fps_embedder.silence()
        for block in self.temporal_blocks:
            cast(Block, block).silence()

    def token_grid(self, latent_grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tokens along frames, rows and columns of latents that are padded to whole patches."""
        t, h, w = (-(-size // patch) for size, patch in zip(latent_grid, self.config.patch_size, strict=True))
        return t, h, w

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None = None,
        x_mask: torch.Tensor | None = None,
        fps: torch.Tensor | None = None,
        height: torch.Tensor | None = None,
        width: torch.Tensor | None = None,
        drop_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: latents (B, channels, t, h, w) of any size.
            timestep: (B,) float32 in [0, 1000].
            y: text embeddings (B, 1, L, D).
            mask: (B, L), non-zero where there is a text token; None when all are.
            x_mask: (B, T) bool, False for frames that are given clean, whose timestep is 0; None when none are.
            fps: (B,) frames per second.
            height, width: (B,) size in pixels; the first one counts for the whole batch.
            drop_ids: (B,) bool, True where the caption is replaced by the learned one for no caption.

        Returns:
            (B, channels or twice as many, t, h, w), at least float32: x_0 - noise, and then unused channels.
        """
        assert fps is not None and height is not None and width is not None
        dtype, latent_grid = x.dtype, (x.shape[2], x.shape[3], x.shape[4])
        num_frames, rows, columns = self.token_grid(latent_grid)
        resolution = (float(height[0]) * float(width[0])) ** 0.5
        positions = spatial_positions(
            rows, columns, self.config.hidden_size, resolution / self.config.input_sq_size, x.device
        )

        fps_embedding = self.fps_embedder(fps, dtype)
        t = self.t_embedder(timestep, dtype) + fps_embedding
        t0 = None
        modulation = self.t_block(t).unflatten(-1, (1, 6, -1))
        if x_mask is not None:
            t0 = self.t_embedder(torch.zeros_like(timestep), dtype) + fps_embedding
            clean = self.t_block(t0).unflatten(-1, (1, 6, -1))
            modulation = torch.where(x_mask[:, :, None, None], modulation, clean)

        if drop_ids is not None:
            y = torch.where(drop_ids[:, None, None, None], self.y_embedder.y_embedding, y)
        text = self.y_embedder(y.squeeze(1).to(dtype))
        mask = None if mask is None else mask.bool()

        hidden = self.x_embedder(x).flatten(2, 3) + positions.to(dtype)
        rotary = self.rope(num_frames)
        for spatial_block, temporal_block in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            hidden = spatial_block(hidden, text, modulation, mask)
            hidden = temporal_block(hidden, text, modulation, mask, rotary)
        patches = self.final_layer(hidden, t, x_mask, t0)
        out = self._unpatchify(patches, (num_frames, rows, columns), latent_grid)
        return out.to(torch.promote_types(dtype, torch.float32))

    def _unpatchify(
        self, patches: torch.Tensor, token_grid: tuple[int, int, int], latent_grid: tuple[int, int, int]
    ) -> torch.Tensor:
        """(B, T, S, patch channels) to (B, channels, t, h, w), without what was padded."""
        sizes: tuple[Any, ...] = (*token_grid, *self.config.patch_size, -1)
        x = patches.reshape(len(patches), *sizes).permute(0, 7, 1, 4, 2, 5, 3, 6)
        x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        t, h, w = latent_grid
        return x[:, :, :t, :h, :w]
