"""How the layers of each VAE class of diffusers run on a part of a clip.

One table per class: for each kind of layer, the function that stands in for its `forward` while a clip is split. Layers
that are not in a table treat every position by itself and stay as they are. The functions follow the `forward` of
diffusers.models.autoencoders.autoencoder_kl_{cogvideox,hunyuan_video,ltx,wan}, whose weights and settings they use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as cogvideox
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as hunyuan_video
from diffusers.models.autoencoders import autoencoder_kl_ltx as ltx
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from diffusers.models.downsampling import CogVideoXDownsample3D
from torch import nn

from ttv_train.encoders.vae.layers import (
    attention_per_frame,
    causal_conv,
    downsampling_conv,
    frame_causal_attention,
    group_norm,
)
from ttv_train.encoders.vae.split import TIME, Split, TimeSplit

Layer = Callable[..., Any]
"""Stands in for a module's `forward`; called with the module, the split, and the arguments of `forward`."""


@dataclass(frozen=True)
class LayerTable:
    """The layers of a VAE class that see more than one position."""

    layers: Mapping[type[nn.Module], Layer]
    time_layers: Mapping[type[nn.Module], Layer] = field(default_factory=dict)
    """Used along time only, in addition."""
    row_layers: Mapping[type[nn.Module], Layer] = field(default_factory=dict)
    """Used along rows only, in addition."""
    whole_clip: bool = True
    """Whether the encoder's result is the same for a whole clip as for the VAE's own frame batches. False where a batch
    has to go through the encoder as it is, with all ranks working on it."""
    frame_batches: Callable[[Any, int], list[int]] | None = None
    """Latent frames at which the VAE's frame batches end, of the VAE and a number of frames, where norms take
    statistics per batch."""

    prepare: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """What the VAE does to its pixels before the encoder sees them."""

    def of(self, dim: int) -> dict[type[nn.Module], Layer]:
        return {**self.layers, **(self.time_layers if dim == TIME else self.row_layers)}


def _group_norm(norm: nn.GroupNorm, split: Split, x: torch.Tensor) -> torch.Tensor:
    return group_norm(norm, x, split)


# CogVideoX: convolutions carry their last frames from one frame batch to the next, norms begin anew in each.


def _cogvideox_conv(
    module: Any, split: Split, x: torch.Tensor, conv_cache: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    k_t = module.time_kernel_size
    past = conv_cache if k_t > 1 else None
    output = causal_conv(module.conv, x, split, time_mode="replicate", space_mode="zeros", past=past)
    if k_t == 1 or split.dim == TIME:
        return output, None
    begun = past if past is not None else x[:, :, :1].expand(-1, -1, k_t - 1, -1, -1)
    return output, torch.cat([begun, x[:, :, 1 - k_t :]], TIME)[:, :, 1 - k_t :].clone()


def _cogvideox_downsample(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    if module.compress_time:
        # The clip's first frame stays alone.
        alone = x.shape[TIME] % 2
        pairs = x[:, :, alone:]
        x = torch.cat([x[:, :, :alone], (pairs[:, :, ::2] + pairs[:, :, 1::2]) / 2], TIME)
    return downsampling_conv(module.conv, x, split)


def _cogvideox_batches(vae: Any, num_frames: int) -> list[int]:
    size, factor = vae.num_sample_frames_batch_size, int(vae.config.temporal_compression_ratio)
    count = max(num_frames // size, 1)
    first = num_frames - (count - 1) * size
    return [(first - 1) // factor + 1 + batch * (size // factor) for batch in range(count)]


# HunyuanVideo: norms and attention span the whole tile that `encode` cuts.


def _hunyuan_conv(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    assert module.pad_mode == "replicate"
    return causal_conv(module.conv, x, split, time_mode="replicate", space_mode="replicate")


def _hunyuan_mid_block(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    x = module.resnets[0](x)
    for attention, resnet in zip(module.attentions, module.resnets[1:], strict=True):
        if attention is not None:
            tokens = group_norm(attention.group_norm, x, split).movedim(1, -1)
            query, key, value = (
                layer(tokens).movedim(-1, 1) for layer in (attention.to_q, attention.to_k, attention.to_v)
            )
            attended = frame_causal_attention(query, key, value, attention.heads, split).movedim(1, -1)
            x = (attention.to_out[0](attended).movedim(-1, 1) + x) / attention.rescale_output_factor
        x = resnet(x)
    return x


# LTX-Video: every layer but the convolutions treats positions by themselves.


def _ltx_conv(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    assert module.conv.padding_mode == "zeros"
    return causal_conv(module.conv, x, split, time_mode="replicate", space_mode="zeros")


def _ltx_downsampler(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    if split.has_first_frame:
        x = torch.cat([x[:, :, : module.stride[0] - 1], x], TIME)
    residual = _fold(x, module.stride).unflatten(1, (-1, module.group_size)).mean(2)
    return _fold(module.conv(x), module.stride) + residual


def _fold(x: torch.Tensor, stride: tuple[int, int, int]) -> torch.Tensor:
    """Blocks of `stride` positions as channels: (B, C * blocks, T / s_t, H / s_h, W / s_w)."""
    x = x.unflatten(4, (-1, stride[2])).unflatten(3, (-1, stride[1])).unflatten(2, (-1, stride[0]))
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


# Wan: the feature cache makes a clip in chunks equal to the clip as a whole.


def _wan_prepare(vae: Any, video: torch.Tensor) -> torch.Tensor:
    patch_size = vae.config.patch_size
    return video if patch_size is None else wan.patchify(video, patch_size)


def _wan_conv(module: Any, split: Split, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
    is_padded = module._padding[4] > 0
    past = cache_x if is_padded else None
    return causal_conv(module, x, split, time_mode="zeros", space_mode="zeros", past=past, is_padded=is_padded)


def _wan_resample(module: Any, split: TimeSplit, x: torch.Tensor, **_: Any) -> torch.Tensor:
    x = downsampling_conv(module.resample[1], x, split)
    if module.mode == "downsample3d":
        # The clip's first frame passes by; every later one is made of three.
        first = x[:, :, :1] if split.has_first_frame else x[:, :, :0]
        x = torch.cat([first, module.time_conv(x)], TIME)
    return x


def _wan_resample_rows(
    module: Any, split: Split, x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
) -> torch.Tensor:
    x = downsampling_conv(module.resample[1], x, split)
    if module.mode == "downsample3d":
        index, feat_idx[0] = feat_idx[0], feat_idx[0] + 1
        past, feat_cache[index] = feat_cache[index], x[:, :, -1:].clone()
        if past is not None:
            x = module.time_conv(torch.cat([past, x], TIME))
    return x


def _wan_attention(module: Any, split: Split, x: torch.Tensor) -> torch.Tensor:
    B, _, T, _, _ = x.shape
    normalized = module.norm(x.transpose(1, 2).flatten(0, 1))
    query, key, value = module.to_qkv(normalized).unflatten(0, (B, T)).transpose(1, 2).chunk(3, 1)
    attended = attention_per_frame(query, key, value, split)
    projected = module.proj(attended.transpose(1, 2).flatten(0, 1))
    return projected.unflatten(0, (B, T)).transpose(1, 2) + x


TABLES: dict[str, LayerTable] = {
    "AutoencoderKLCogVideoX": LayerTable(
        layers={
            cogvideox.CogVideoXCausalConv3d: _cogvideox_conv,
            CogVideoXDownsample3D: _cogvideox_downsample,
            nn.GroupNorm: _group_norm,
        },
        frame_batches=_cogvideox_batches,
    ),
    "AutoencoderKLHunyuanVideo": LayerTable(
        layers={
            hunyuan_video.HunyuanVideoCausalConv3d: _hunyuan_conv,
            hunyuan_video.HunyuanVideoMidBlock3D: _hunyuan_mid_block,
            nn.GroupNorm: _group_norm,
        },
        whole_clip=False,
    ),
    "AutoencoderKLLTXVideo": LayerTable(
        layers={ltx.LTXVideoCausalConv3d: _ltx_conv, ltx.LTXVideoDownsampler3d: _ltx_downsampler}
    ),
    "AutoencoderKLWan": LayerTable(
        layers={wan.WanCausalConv3d: _wan_conv},
        time_layers={wan.WanResample: _wan_resample},
        row_layers={wan.WanResample: _wan_resample_rows, wan.WanAttentionBlock: _wan_attention},
        prepare=_wan_prepare,
    ),
}
