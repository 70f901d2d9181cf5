"""Text encoders behind one protocol, chosen by `text_encoder.kind`."""

from dataclasses import replace

import torch

from ttv_train.config import HashTextEncoderConfig, TextEncoderConfig
from ttv_train.encoders.text.base import TextEncoder
from ttv_train.encoders.text.recipes import DEFAULT_LENGTH, RECIPES

__all__ = ["TextEncoder", "build_text_encoder", "max_text_tokens"]


def max_text_tokens(config: TextEncoderConfig) -> int:
    """Rows of the longest caption's embedding: `max_length` of the text encoder, without opening its folder."""
    if isinstance(config, HashTextEncoderConfig):
        return config.max_length
    if config.recipe is None:
        return config.max_length or DEFAULT_LENGTH
    recipe = RECIPES[config.recipe]
    return replace(recipe, max_length=config.max_length or recipe.max_length).num_rows


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
