"""Layers of STDiT3 (Open-Sora 1.2, arXiv 2412.20404).

Shapes: B samples, T frames and S = H W locations of tokens, C channels, L text tokens, N heads, D channels per head.
Module names are those of the published checkpoints.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from ttv_train.models.rotary import apply_rotary_interleaved
from ttv_train.ops.attention import attention
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel

NORM_EPS = 1e-6
SINUSOID_CHANNELS = 256


class PatchEmbed3D(nn.Module):
    """Patches of latents to tokens. Sizes that are no multiple of the patch are zero-padded at their far end."""

    def __init__(self, patch_size: tuple[int, int, int], in_channels: int, hidden_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, channels, t, h, w) to (B, T, H, W, C)."""
        pad_t, pad_h, pad_w = (-size % patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True))
        return self.proj(F.pad(x, (0, pad_w, 0, pad_h, 0, pad_t))).permute(0, 2, 3, 4, 1)


class ScalarEmbedder(nn.Module):
    """Timesteps or frame rates to vectors: sinusoids, cosines first, and an MLP."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        first, second = nn.Linear(SINUSOID_CHANNELS, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(first, nn.SiLU(), second)

    def silence(self) -> None:
        """Makes a new embedding zero."""
        first, _, second = self.mlp
        nn.init.normal_(cast(nn.Linear, first).weight, std=0.02)
        nn.init.zeros_(cast(nn.Linear, second).weight)

    def forward(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(B,) float32 to (B, C) of `dtype`."""
        half = SINUSOID_CHANNELS // 2
        exponents = torch.arange(half, dtype=torch.float32, device=values.device) / half
        angles = values[:, None].float() * torch.exp(-math.log(10000) * exponents)
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))


class Mlp(nn.Module):
    """Two linear layers around an approximate GELU."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_channels, hidden_channels)
        self.fc2 = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Projects text embeddings, and holds the embedding that stands for no caption."""

    def __init__(self, caption_channels: int, hidden_size: int, max_length: int) -> None:
        super().__init__()
        self.y_proj = Mlp(caption_channels, hidden_size, hidden_size)
        self.y_embedding: torch.Tensor
        self.register_buffer("y_embedding", torch.randn(max_length, caption_channels) / caption_channels**0.5)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.y_proj(y)


class RotaryTime(nn.Module):
    """Rotary positions of frames. The frequencies are part of the checkpoint, but not trained."""

    def __init__(self, head_channels: int) -> None:
        super().__init__()
        self.freqs: torch.Tensor
        self.register_buffer("freqs", 10000 ** -(torch.arange(0, head_channels, 2).float() / head_channels))

    def forward(self, num_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each (T, D) float32, every angle repeated for its pair of channels."""
        positions = torch.arange(num_frames, device=self.freqs.device, dtype=torch.float32)
        angles = torch.outer(positions, self.freqs.float()).repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def spatial_positions(
    rows: int, columns: int, channels: int, resolution_scale: float, device: torch.device
) -> torch.Tensor:
    """Sines and cosines of column and row, for coordinates that keep their range at any resolution.

    A grid of rows x columns is mapped to a square one of the same area, and divided by `resolution_scale`, the side of
    the video over that of the training videos, in pixels.

    Returns:
        (rows * columns, channels) float32: half of the channels for columns, half for rows.
    """
    base = round((rows * columns) ** 0.5)
    half = channels // 2
    frequencies = 1.0 / (10000 ** (torch.arange(0, half, 2, device=device).float() / half))

    def embed(length: int) -> torch.Tensor:
        coordinates = torch.arange(length, device=device) / resolution_scale * (base / length)
        angles = torch.outer(coordinates, frequencies)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    of_rows, of_columns = embed(rows)[:, None], embed(columns)[None, :]
    grid = (rows, columns, half)
    return torch.cat((of_columns.expand(grid), of_rows.expand(grid)), dim=-1).flatten(0, 1)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


class SelfAttention(nn.Module):
    """Attention over locations within each frame, or over frames at each location.

    Locations are the dimension that ranks share. Attention over frames therefore needs no exchange, and attention over
    locations is exchanged by the scheme: around the attention (ulysses, ring, usp), or by switching the shared
    dimension to frames and back (dsp).
    """

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool, temporal: bool) -> None:
        super().__init__()
        self.num_heads, self.temporal = num_heads, temporal
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm: nn.Module = nn.RMSNorm(hidden_size // num_heads, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(hidden_size // num_heads, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.sequence: SequenceParallel = NoSequenceParallel()

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """(B, T, S_local, C) to the same."""
        if self.temporal:
            return self._attend(x.transpose(1, 2), rotary).transpose(1, 2)
        x = self.sequence.switch(x, from_dim=2, to_dim=1, from_name="tokens", to_name="frames")
        x = self._attend(x, rotary)
        return self.sequence.switch(x, from_dim=1, to_dim=2, from_name="frames", to_name="tokens")

    def _attend(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Attention along dimension 2 of four."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.flatten(0, 1).permute(2, 0, 3, 1, 4)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = apply_rotary_interleaved(query, rotary), apply_rotary_interleaved(key, rotary)
        if self.temporal:
            out = attention(query, key, value)
        else:
            out, _ = self.sequence.attention(query, key, value)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class CrossAttention(nn.Module):
    """Attention to the text, which every rank holds."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.kv_linear = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Tokens (B, T, S_local, C), text (B, L, C) and its mask (B, L) bool to (B, T, S_local, C)."""
        query = self.q_linear(x).flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = self.kv_linear(y).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = attention(query, key, value, key_mask=mask)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Self-attention over space or over time, cross-attention to the text, MLP; the first and the last are modulated
    by the timestep."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, qk_norm: bool, temporal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, NORM_EPS, elementwise_affine=False)
        self.attn = SelfAttention(hidden_size, num_heads, qk_norm, temporal)
        self.cross_attn = CrossAttention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, NORM_EPS, elementwise_affine=False)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), hidden_size)
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / hidden_size**0.5)

    def silence(self) -> None:
        """Makes a new block the identity."""
        for layer in (self.attn.proj, self.cross_attn.proj, self.mlp.fc2):
            nn.init.zeros_(layer.weight)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        t: torch.Tensor,
        mask: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: (B, T, S_local, C).
            y: text (B, L, C).
            t: modulation (B, T, 6, C), or (B, 1, 6, C) when all frames have the same timestep.
            mask: (B, L) bool, True where a text token may be attended to.
            rotary: cosine and sine of the frames, each (T, D), for attention over time.
        """
        modulation = (self.scale_shift_table + t).unsqueeze(2).unbind(3)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate_attention * self.attn(modulate(self.norm1(x), shift_attention, scale_attention), rotary)
        x = x + self.cross_attn(x, y, mask)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Tokens to patches of latents."""

    def __init__(self, hidden_size: int, patch_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, NORM_EPS, elementwise_affine=False)
        self.linear = nn.Linear(hidden_size, patch_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, x_mask: torch.Tensor | None, t0: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, T, S_local, C) to (B, T, S_local, patch channels), modulated by timestep embeddings t and t0 (B, C)."""
        out = self._modulated(x, t)
        if x_mask is not None:
            assert t0 is not None
            # Clean frames are normalized and modulated twice: the published checkpoints were trained so.
            out = torch.where(x_mask[:, :, None, None], out, self._modulated(out, t0))
        return self.linear(out)

    def _modulated(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        shift, scale = (self.scale_shift_table + t[:, None]).unsqueeze(2).unsqueeze(2).unbind(1)
        return modulate(self.norm_final(x), shift, scale)
