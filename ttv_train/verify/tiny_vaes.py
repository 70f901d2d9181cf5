"""A small VAE of each class with random weights, and what its ranks should have to send."""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import nn

from ttv_train.encoders.vae.diffusers import GEOMETRIES, LatentGeometry
from ttv_train.encoders.vae.split import TIME
from ttv_train.parallel.sequence.shapes import split_sizes

Call = tuple[nn.Module, tuple[int, ...]]
"""Of a layer, with the shape of its input."""

SETTINGS: dict[str, dict[str, Any]] = {
    "AutoencoderKLCogVideoX": {
        "block_out_channels": (8, 8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
    },
    "AutoencoderKLHunyuanVideo": {
        "block_out_channels": (8, 8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "AutoencoderKLLTXVideo": {
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "latent_channels": 8,
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    },
    "AutoencoderKLWan": {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
}


def build(name: str) -> tuple[Any, LatentGeometry]:
    """A VAE of class `name`, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = getattr(diffusers, name)(**SETTINGS[name])
    return vae.eval().requires_grad_(False), GEOMETRIES[name](dict(vae.config))


def halo_bytes(vae: Any, geometry: LatentGeometry, video: torch.Tensor, dim: int, degree: int) -> int:
    """What all ranks together should send for the convolutions of one clip, from the shapes of its plain encoding.

    Time: ``B C (k_t - s_t) H W`` elements at every border between ranks, for a causal kernel of k_t frames and stride
    s_t. Space: at every border ``(k - 1) / 2`` rows downwards and ``k - s - (k - 1) / 2`` upwards, of ``B C T W``; a
    downsampling that pads below sends the one row upwards.
    """
    calls = _record(vae, video)
    if dim == TIME:
        clips = _lengths(vae, video, calls)
        borders = sum(min(degree, (frames - 1) // geometry.temporal_factor + 1) - 1 for frames in clips)
        convs = {id(module): (module, shape) for module, shape in calls if _is_causal(module)}
        per_border = sum(
            shape[0] * shape[1] * (_conv(module).kernel_size[0] - _conv(module).stride[0]) * shape[3] * shape[4]
            for module, shape in convs.values()
            if _conv(module).kernel_size[0] > 1
        )
        return borders * per_border * video.element_size()
    borders = min(degree, video.shape[3] // geometry.spatial_factor) - 1
    elements = 0
    for module, shape in calls:
        if _is_causal(module):
            kernel, stride = _conv(module).kernel_size[1], _conv(module).stride[1]
            above = (kernel - 1) // 2
            rows = above + max(0, kernel - stride - above) if kernel > 1 else 0
            elements += rows * shape[0] * shape[1] * shape[2] * shape[4]
        elif isinstance(module, nn.Conv2d) and module.stride[0] == 2:
            # Its input is padded by one column.
            elements += shape[0] * shape[1] * (shape[3] - 1)
    return borders * elements * video.element_size()


def largest_share(vae: Any, geometry: LatentGeometry, video: torch.Tensor, dim: int, degree: int) -> float:
    """The part of the frames or rows at work that the rank with most of them holds; ranges are whole latent positions.

    The first latent frame is one frame, every other one `temporal_factor` of them.
    """
    if dim != TIME:
        rows = video.shape[3] // geometry.spatial_factor
        return split_sizes(rows, degree)[0] / rows
    frames, factor = max(_lengths(vae, video, _record(vae, video))), geometry.temporal_factor
    first, *others = split_sizes((frames - 1) // factor + 1, degree)
    return max(1 + (first - 1) * factor, *(size * factor for size in others), 0) / frames


def _lengths(vae: Any, video: torch.Tensor, calls: Sequence[Call]) -> list[int]:
    """Frames of the pieces of a clip that ranks share along time: HunyuanVideo's tiles, or the clip."""
    if type(vae).__name__ == "AutoencoderKLHunyuanVideo":
        return [shape[2] for module, shape in calls if module is vae.encoder]
    return [video.shape[2]]


def _conv(module: Any) -> nn.Conv3d:
    return module if isinstance(module, nn.Conv3d) else module.conv


def _is_causal(module: nn.Module) -> bool:
    return type(module).__name__.endswith("CausalConv3d")


def _record(vae: Any, video: torch.Tensor) -> list[Call]:
    """Every call of a layer of the plain encoder with the shape of its input; frames carried along count."""
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = list(args[0].shape)
        carried = args[1] if len(args) > 1 else kwargs.get("conv_cache")
        if _is_causal(module) and isinstance(carried, torch.Tensor) and _conv(module).kernel_size[0] > 1:
            shape[2] += carried.shape[2]
        calls.append((module, tuple(shape)))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in vae.encoder.modules()]
    try:
        vae._encode(video)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
