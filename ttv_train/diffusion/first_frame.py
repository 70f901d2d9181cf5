"""What image-to-video models are given of the first frame of a clip."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FirstFrame:
    """Of one clip, or with a leading dimension B of a batch."""

    latents: torch.Tensor
    """([B,] C, t, h, w): the VAE's mean for a clip that is the first frame and then grey, normalized like the clip's
    latents before a model sees them."""
    embeds: torch.Tensor | None = None
    """([B,] N, D): the patches of an image encoder, for models that take them."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "FirstFrame":
        embeds = None if self.embeds is None else self.embeds.to(device, dtype)
        return FirstFrame(self.latents.to(device, dtype), embeds)

    def twice(self) -> "FirstFrame":
        """The batch followed by itself, for guidance."""
        embeds = None if self.embeds is None else torch.cat([self.embeds, self.embeds])
        return FirstFrame(torch.cat([self.latents, self.latents]), embeds)
