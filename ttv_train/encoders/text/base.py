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
        """Rows L per caption, those of padding included."""
        ...

    @property
    def stores_padding(self) -> bool:
        """Whether the diffusion model is given the embeddings of padding as they are. Otherwise it masks them or gets
        zeros, and they are not stored."""
        ...

    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeds B captions, without gradient; longer ones are cut, shorter ones padded. The empty caption is allowed.

        Returns:
            prompt_embeds: (B, L, D) of the config's dtype.
            prompt_mask: (B, L) bool, True where there is a token. Padding follows the tokens.
        """
        ...
