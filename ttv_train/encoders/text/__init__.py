"""Text encoders behind one protocol, chosen by `text_encoder.kind`."""

import torch

from ttv_train.config import HashTextEncoderConfig, TextEncoderConfig
from ttv_train.encoders.text.base import TextEncoder

__all__ = ["TextEncoder", "build_text_encoder"]


def build_text_encoder(config: TextEncoderConfig, device: torch.device) -> TextEncoder:
    """The text encoder of a config's `text_encoder` section. Cheap: weights are loaded at the first encode.

    Raises:
        UserError: `text_encoder.path` is not a supported model folder, or there is no tokenizer.
    """
    if isinstance(config, HashTextEncoderConfig):
        from ttv_train.encoders.text.hash import HashTextEncoder

        return HashTextEncoder(config, device)
    from ttv_train.encoders.text.transformers import TransformersTextEncoder

    return TransformersTextEncoder(config, device)
