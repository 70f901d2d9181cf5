"""Frozen encoders: videos and captions to what the diffusion model trains on."""

import hashlib
import json

from ttv_train.config import RunConfig
from ttv_train.encoders.text import text_encoder_fingerprint
from ttv_train.encoders.vae import vae_fingerprint

__all__ = ["encoder_fingerprint", "latents_fingerprint"]


def encoder_fingerprint(config: RunConfig) -> str:
    """Digest of both encoders: with a clip's content and its decode settings it decides what is stored for the clip.

    Raises:
        UserError: a model folder is missing.
    """
    parts = [vae_fingerprint(config.vae), text_encoder_fingerprint(config.text_encoder)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def latents_fingerprint(config: RunConfig) -> str:
    """Digest of every setting that decides what an encoded dataset holds: the encoders, and how clips are cut.

    Raises:
        UserError: a model folder is missing.
    """
    cut = config.dataset.model_dump(mode="json", include={"fps", "buckets", "max_clips_per_video", "decoder"})
    return hashlib.sha256(json.dumps([encoder_fingerprint(config), cut]).encode()).hexdigest()
