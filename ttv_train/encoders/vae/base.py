"""What every video VAE offers: from pixels to latents and back.

Shapes: B clips, C channels, T frames of H x W pixels; latents have t frames of h x w positions.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ttv_train.errors import UserError


@dataclass(frozen=True)
class LatentNormalization:
    """Brings latents to about unit scale: ``normalized = (latents - shift) * scale``.

    It is recorded with the stored latents and applied once, when they are read. Each tuple has one value per channel,
    or a single one for all.
    """

    shift: tuple[float, ...]
    scale: tuple[float, ...]

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        """Stored latents (B, C, t, h, w) as the diffusion model sees them."""
        return self.normalize_(latents.clone())

    def normalize_(self, latents: torch.Tensor) -> torch.Tensor:
        """`normalize`, in place."""
        return latents.sub_(_per_channel(self.shift, latents)).mul_(_per_channel(self.scale, latents))

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The inverse: what the diffusion model made, (B, C, t, h, w), as `VideoVae.decode` takes it."""
        return latents / _per_channel(self.scale, latents) + _per_channel(self.shift, latents)


class LatentDistribution(NamedTuple):
    """The posterior of a batch of clips, not normalized."""

    mean: torch.Tensor
    """(B, C, t, h, w)"""
    logvar: torch.Tensor | None
    """Log-variance of the same shape; None for an autoencoder that is not variational."""


class VideoVae(Protocol):
    """A video autoencoder on one device. Weights are loaded when they are first needed."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the latents of a given clip: class, settings, weights, dtype."""
        ...

    @property
    def latent_channels(self) -> int: ...

    @property
    def spatial_factor(self) -> int:
        """H / h and W / w."""
        ...

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame."""
        ...

    @property
    def normalization(self) -> LatentNormalization: ...

    def valid_num_frames(self, num_frames: int) -> bool:
        """Whether a clip of `num_frames` is encoded without dropping or repeating a frame."""
        ...

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """``(C, t, h, w)`` of a clip. Raises UserError if the VAE cannot take this size."""
        ...

    def encode(self, video: torch.Tensor) -> LatentDistribution:
        """Encodes (B, 3, T, H, W) float pixels in [-1, 1], without gradient; the latents are of the config's dtype."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decodes latents (B, C, t, h, w), not normalized, to float32 (B, 3, T, H, W) in [-1, 1], without gradient."""
        ...


def check_bucket(vae: VideoVae, num_frames: int, height: int, width: int) -> None:
    """Raises UserError, with the nearest sizes that fit, if `vae` cannot take clips of this size."""
    factor = vae.spatial_factor
    wrong = None
    if height % factor or width % factor:
        nearest = f"{num_frames}x{_nearest_multiple(height, factor)}x{_nearest_multiple(width, factor)}"
        wrong = f"height and width must be multiples of {factor}; the nearest is {nearest}"
    elif not vae.valid_num_frames(num_frames):
        reach = vae.temporal_factor
        fewer = [n for n in range(max(1, num_frames - reach), num_frames) if vae.valid_num_frames(n)]
        more = [n for n in range(num_frames + 1, num_frames + reach + 1) if vae.valid_num_frames(n)]
        wrong = f"it takes {' or '.join(map(str, fewer[-1:] + more[:1]))} frames"
    if wrong:
        raise UserError(f"dataset.buckets {num_frames}x{height}x{width} does not suit the VAE: {wrong}")


def _nearest_multiple(value: int, factor: int) -> int:
    return max(factor, round(value / factor) * factor)


def _per_channel(values: tuple[float, ...], latents: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
