"""Frozen encoders: videos and captions to what the diffusion model trains on."""

import torch

from ttv_train.config import DatasetConfig, RunConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.text import TextEncoder, build_text_encoder
from ttv_train.encoders.vae import VideoVae, build_vae

__all__ = ["dataset_fingerprint", "encoder_fingerprint", "encoder_fingerprints"]


def encoder_fingerprint(config: RunConfig) -> str:
    """Digest of every setting that decides what an encoded dataset holds: both encoders with their weights and dtypes,
    and how clips are cut from videos. Latents of another fingerprint are stale.

    Reads the weight files, which takes seconds for gigabytes.

    Raises:
        UserError: an encoder's folder is missing or not supported.
    """
    cpu = torch.device("cpu")
    vae, text_encoder = build_vae(config.vae, cpu), build_text_encoder(config.text_encoder, cpu)
    return dataset_fingerprint(vae, text_encoder, config.dataset)


def encoder_fingerprints(config: RunConfig) -> tuple[str, str]:
    """Digests of the VAE and of the text encoder, whatever dataset they encode. Raises as `encoder_fingerprint`."""
    cpu = torch.device("cpu")
    return build_vae(config.vae, cpu).fingerprint, build_text_encoder(config.text_encoder, cpu).fingerprint


def dataset_fingerprint(vae: VideoVae, text_encoder: TextEncoder, dataset: DatasetConfig) -> str:
    """`encoder_fingerprint` of encoders that are built already."""
    return fingerprint(
        {
            "vae": vae.fingerprint,
            "text_encoder": text_encoder.fingerprint,
            "fps": dataset.fps,
            "buckets": sorted(set(dataset.buckets)),
            "max_clips_per_video": dataset.max_clips_per_video,
            "decoder": dataset.decoder,
            **({"keep_probability": dataset.keep_probability} if dataset.keep_probability else {}),
        }
    )
