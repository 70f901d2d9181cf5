"""What every text encoder offers: from captions to token embeddings."""

from typing import Protocol

import torch


class TextEncoder(Protocol):
    """A text encoder on one device. Weights are loaded when they are first needed."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the embedding of a given caption: class, settings, weights, dtype."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width D of a token embedding."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens L per caption."""
        ...

    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeds B captions, without gradient; longer ones are cut, shorter ones padded. The empty caption is allowed.

        Returns:
            prompt_embeds: (B, L, D) of the config's dtype.
            prompt_mask: (B, L) bool, True where there is a token.
        """
        ...
