"""Video VAEs behind one protocol, chosen by `vae.kind`."""

import torch
import torch.distributed as dist

from ttv_train.config import VaeConfig, WaveletVaeConfig
from ttv_train.encoders.vae.base import LatentDistribution, LatentNormalization, VideoVae

__all__ = ["LatentDistribution", "LatentNormalization", "VideoVae", "build_vae"]


def build_vae(config: VaeConfig, device: torch.device, group: dist.ProcessGroup | None = None) -> VideoVae:
    """The VAE of a config's `vae` section. Cheap: weights are loaded at the first encode or decode.

    Args:
        config: `parallel.mode` says how a clip is encoded.
        device: where it is encoded.
        group: in the modes `time` and `space`, the ranks that share each clip: all of them call `encode` with the same
            clips in the same order. Without it this process encodes alone.

    Raises:
        UserError: `vae.path` is not a supported model folder, or `vae.channels` is too large.
    """
    if isinstance(config, WaveletVaeConfig):
        from ttv_train.encoders.vae.wavelet import WaveletVae

        return WaveletVae(config, device, group)
    from ttv_train.encoders.vae.diffusers import DiffusersVae

    return DiffusersVae(config, device, group)
