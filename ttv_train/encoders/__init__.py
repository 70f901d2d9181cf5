"""Frozen encoders: videos and captions to what the diffusion model trains on."""

import torch

from ttv_train.config import RunConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae import build_vae

__all__ = ["encoder_fingerprint"]


def encoder_fingerprint(config: RunConfig) -> str:
    """Digest of every setting that decides what an encoded dataset holds: both encoders with their weights and dtypes,
    and how clips are cut from videos. Latents of another fingerprint are stale.

    Reads the weight files, which takes seconds for gigabytes.

    Raises:
        UserError: an encoder's folder is missing or not supported.
    """
    cpu = torch.device("cpu")
    dataset = config.dataset
    return fingerprint(
        {
            "vae": build_vae(config.vae, cpu).fingerprint,
            "text_encoder": build_text_encoder(config.text_encoder, cpu).fingerprint,
            "fps": dataset.fps,
            "buckets": sorted(set(dataset.buckets)),
            "max_clips_per_video": dataset.max_clips_per_video,
            "decoder": dataset.decoder,
        }
    )
