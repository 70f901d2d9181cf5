"""Frozen encoders: videos and captions to what the diffusion model trains on."""

import torch

from ttv_train.config import DatasetConfig, FirstFrameConfig, RunConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.first_frame import FirstFrameEncoder
from ttv_train.encoders.text import TextEncoder, build_text_encoder
from ttv_train.encoders.vae import VideoVae, build_vae

__all__ = ["dataset_fingerprint", "encoder_fingerprint", "encoder_fingerprints", "visual_fingerprint"]


def encoder_fingerprint(config: RunConfig) -> str:
    """Digest of every setting that decides what an encoded dataset holds: both encoders with their weights and dtypes,
    and how clips are cut from videos. Latents of another fingerprint are stale.

    Reads the weight files, which takes seconds for gigabytes.

    Raises:
        UserError: an encoder's folder is missing or not supported.
    """
    cpu = torch.device("cpu")
    vae, text_encoder = build_vae(config.vae, cpu), build_text_encoder(config.text_encoder, cpu)
    return dataset_fingerprint(visual_fingerprint(vae, config.first_frame), text_encoder, config.dataset)


def encoder_fingerprints(config: RunConfig) -> tuple[str, str]:
    """Digests of what encodes frames and of the text encoder, whatever dataset they encode. Raises as
    `encoder_fingerprint`."""
    cpu = torch.device("cpu")
    visual = visual_fingerprint(build_vae(config.vae, cpu), config.first_frame)
    return visual, build_text_encoder(config.text_encoder, cpu).fingerprint


def visual_fingerprint(vae: VideoVae, first_frame: FirstFrameConfig) -> str:
    """Digest of everything that decides what the frames of a given clip are encoded to."""
    if not first_frame.enabled:
        return vae.fingerprint
    encoder = FirstFrameEncoder(first_frame, torch.device("cpu"))
    return fingerprint({"vae": vae.fingerprint, "first_frame": encoder.fingerprint})


def dataset_fingerprint(visual: str, text_encoder: TextEncoder, dataset: DatasetConfig) -> str:
    """`encoder_fingerprint` of encoders that are built already, `visual` by `visual_fingerprint`."""
    return fingerprint(
        {
            "vae": visual,
            "text_encoder": text_encoder.fingerprint,
            "fps": dataset.fps,
            "buckets": sorted(set(dataset.buckets)),
            "max_clips_per_video": dataset.max_clips_per_video,
            "decoder": dataset.decoder,
            **({"split": dataset.split} if dataset.split != "length" else {}),
            **({"keep_probability": dataset.keep_probability} if dataset.keep_probability else {}),
        }
    )
