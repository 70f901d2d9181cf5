"""Video VAEs behind one protocol, chosen by `vae.kind`."""

import torch

from ttv_train.config import VaeConfig, WaveletVaeConfig
from ttv_train.encoders.vae.base import LatentDistribution, LatentNormalization, VideoVae

__all__ = ["LatentDistribution", "LatentNormalization", "VideoVae", "build_vae"]


def build_vae(config: VaeConfig, device: torch.device) -> VideoVae:
    """The VAE of a config's `vae` section. Cheap: weights are loaded at the first encode or decode.

    Raises:
        UserError: `vae.path` is not a supported model folder, or `vae.channels` is too large.
    """
    if isinstance(config, WaveletVaeConfig):
        from ttv_train.encoders.vae.wavelet import WaveletVae

        return WaveletVae(config, device)
    from ttv_train.encoders.vae.diffusers import DiffusersVae

    return DiffusersVae(config, device)
