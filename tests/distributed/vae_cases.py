"""Tiny VAEs that ranks build alike, and what they find when they encode the same clip together."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.encoders.tiny_models import TINY_VAES, save_vae
from ttv_train.config import DiffusersVaeConfig, VaeParallelConfig, WaveletVaeConfig
from ttv_train.encoders.vae import LatentDistribution, VideoVae, build_vae

CPU = torch.device("cpu")
VAES = (*TINY_VAES, "wavelet")
WAN_2_2 = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
LTX_0_9_5 = {
    "down_block_types": ("LTXVideo095DownBlock3D",) * 3,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 8, 8),
    "layers_per_block": (1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, True),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "downsample_type": ("spatial", "temporal", "spatiotemporal"),
    "upsample_residual": (False, False, False),
    "upsample_factor": (1, 1, 1),
    "temporal_compression_ratio": 4,
    "spatial_compression_ratio": 16,
}


def build(name: str, folder: Path, group: dist.ProcessGroup | None = None, settings: dict | None = None, **parallel):
    """A VAE with seeded weights. `parallel` is its config's section, `settings` are those of its class."""
    section = VaeParallelConfig(**parallel)
    if name == "wavelet":
        return build_vae(WaveletVaeConfig(kind="wavelet", channels=24, parallel=section), CPU, group)
    if not folder.exists():
        save_vae(folder, name, **(settings or {}))
    config = DiffusersVaeConfig(kind="diffusers", path=str(folder), dtype="float32", parallel=section)
    return build_vae(config, CPU, group)


def clip(vae: VideoVae, latent_frames: int, latent_rows: int) -> torch.Tensor:
    """A seeded clip (1, 3, T, H, W) of so many latent frames and rows, two latent columns wide."""
    frames = latent_frames * vae.temporal_factor
    frames = frames if vae.valid_num_frames(frames) else frames - vae.temporal_factor + 1
    generator = torch.Generator().manual_seed(latent_frames)
    factor = vae.spatial_factor
    return torch.rand(1, 3, frames, latent_rows * factor, 2 * factor, generator=generator) * 2 - 1


def difference(found: LatentDistribution, expected: LatentDistribution) -> float:
    """Largest difference of means and log-variances."""
    pairs = zip(found, expected, strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs if x is not None and y is not None)


def compare(
    rank: int, world_size: int, ranks: list[int], names: list[str], settings: dict, sizes: list[tuple[int, int]], modes
) -> dict[tuple, float]:
    """Largest difference to the plain encoding by VAE, mode and size, for a group of `ranks`."""
    group = dist.new_group(ranks)
    differences = {}
    if rank not in ranks:
        return differences
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            plain = build(name, Path(folder) / name, settings=settings)
            for mode in modes:
                vae = build(name, Path(folder) / name, group, **mode)
                for size in sizes:
                    video = clip(plain, *size)
                    found = vae.encode(video)
                    assert found.mean.shape == (1, *vae.latent_shape(*video.shape[2:]))
                    differences[name, *mode.values(), *size] = difference(found, plain.encode(video))
    return differences
