"""A text encoder without weights: every word hashes to a fixed random vector."""

import re
from functools import lru_cache

import torch

from ttv_train.config import HashTextEncoderConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.parallel.rng import keyed_normal

VERSION = 1
WORD = re.compile(r"\w+|[^\w\s]")
EMPTY_CAPTION = [""]
"""Tokens of a caption without any; no word is empty, so the embedding is one that no caption has."""


class HashTextEncoder:
    """Embeds the words of a caption as normal vectors keyed by the word, plus one keyed by its position.

    The same caption has the same embedding in every process and on every machine, different captions have different
    ones, and captions that share words have related ones. That is enough to tell a few captions apart. The vectors
    know nothing of meaning: "dog" is as far from "puppy" as from "skyscraper", so a model that is trained on them
    learns the captions it has seen and cannot follow others.
    """

    stores_padding = False

    def __init__(self, config: HashTextEncoderConfig, device: torch.device) -> None:
        self.hidden_size = config.hidden_size
        self.max_length = config.max_length
        self.fingerprint = fingerprint({"text_encoder": "hash", "version": VERSION, **config.model_dump()})
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TextEncoder.encode`; padding is zero. Embeddings have about unit variance."""
        embeds = torch.zeros(len(captions), self.max_length, self.hidden_size)
        mask = torch.zeros(len(captions), self.max_length, dtype=torch.bool)
        for row, caption in enumerate(captions):
            words = (WORD.findall(caption.lower()) or EMPTY_CAPTION)[: self.max_length]
            for position, word in enumerate(words):
                vectors = self._vector("word", word) + self._vector("position", position)
                embeds[row, position] = vectors / 2**0.5
            mask[row, : len(words)] = True
        return embeds.to(self._device, self._dtype), mask.to(self._device)

    def _vector(self, purpose: str, key: str | int) -> torch.Tensor:
        return _keyed_vector(self.hidden_size, purpose, key)


@lru_cache(maxsize=65536)
def _keyed_vector(size: int, purpose: str, key: str | int) -> torch.Tensor:
    return keyed_normal((size,), "hash text encoder", VERSION, purpose, key)
