"""An autoencoder without weights: the orthonormal Haar transform in time, height, width and colour."""

import math

import torch
import torch.distributed as dist

from ttv_train.config import WaveletVaeConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.vae.base import LatentDistribution, LatentNormalization, check_bucket
from ttv_train.encoders.vae.split import ROWS, TIME, Split
from ttv_train.errors import UserError
from ttv_train.parallel.sequence.shapes import split_sizes

VERSION = 1

# Grey, red - blue and magenta - green: orthonormal, as the transform of the pixels is.
COLOR_TRANSFORM = ((3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5)), (6**-0.5, -2 * 6**-0.5, 6**-0.5))

# Standard deviation of a band in video of pixels in [-1, 1]. The amplitude of natural images falls as 1 / frequency
# (Field, JOSA A 4, 1987); the constants are fitted to the clips of data/sample at 96 x 160 and 8 frames per second.
GREY_AMPLITUDE = 0.15
CHROMA_AMPLITUDE = 0.0375
TEMPORAL_FREQUENCY_WEIGHT = 2.0
MEAN_BAND_FREQUENCY = 0.2


class WaveletVae:
    """Cuts a video into blocks of ``2**temporal_levels`` x ``2**spatial_levels`` x ``2**spatial_levels`` pixels and
    gives each block's Haar coefficients as latent channels.

    The transform is orthonormal and separable: the full Haar basis of a block in each dimension, and a rotation of the
    colours. With every channel kept it is invertible; with the first K channels, `decode` after `encode` is the
    orthogonal projection onto their bands. Channels are ordered by the amplitude that natural video has in them, so the
    lowest bands come first; `normalization` divides by the same amplitude.

    PSNR of decode(encode) on the clips of data/sample, 8 frames of 96 x 160 at 8 frames per second (all clips pooled),
    for blocks of 2 x 8 x 8 pixels:

        channels    12      24      48      96      192     384
        PSNR (dB)   20.6    22.5    25.7    30.5    44.0    147.0

    It compresses without any knowledge of what video looks like, and its high bands are hard to predict. Use it for
    tests and demonstrations, not for the quality of a model.

    Raises:
        UserError: `config.channels` exceeds the number of bands.
    """

    def __init__(self, config: WaveletVaeConfig, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        bands = _band_amplitudes(config.temporal_levels, config.spatial_levels)
        channels = len(bands) if config.channels is None else config.channels
        if channels > len(bands):
            raise UserError(
                f"vae.channels {channels}: {config.temporal_levels} temporal and {config.spatial_levels} spatial "
                f"levels give {len(bands)} bands; keep at most those, or null for all"
            )
        kept = sorted(range(len(bands)), key=lambda band: (-bands[band], band))[:channels]
        self.latent_channels = channels
        self.spatial_factor = 2**config.spatial_levels
        self.temporal_factor = 2**config.temporal_levels
        self.normalization = LatentNormalization(shift=(0.0,), scale=tuple(1 / bands[band] for band in kept))
        self.fingerprint = fingerprint(
            {"vae": "wavelet", "version": VERSION, **config.model_dump(exclude={"parallel"}), "channels": channels}
        )
        self._mode, self._group = config.parallel.mode, group
        self._num_bands = len(bands)
        self._kept = torch.tensor(kept, device=device)
        self._color = torch.tensor(COLOR_TRANSFORM, device=device)
        self._temporal = haar_matrix(config.temporal_levels).to(device)
        self._spatial = haar_matrix(config.spatial_levels).to(device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)

    def valid_num_frames(self, num_frames: int) -> bool:
        """Whether the frames fill whole blocks."""
        return num_frames > 0 and num_frames % self.temporal_factor == 0

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """``(C, t, h, w)`` of a clip. Raises UserError if it does not divide into blocks."""
        check_bucket(self, num_frames, height, width)
        factor = self.spatial_factor
        return self.latent_channels, num_frames // self.temporal_factor, height // factor, width // factor

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> LatentDistribution:
        """See `VideoVae.encode`; computed in float32, and not variational."""
        if self._mode not in ("time", "space") or self._group is None:
            return LatentDistribution(self._bands(video), None)
        # Blocks do not overlap, so a rank needs nothing of the others.
        dim, factor = (TIME, self.temporal_factor) if self._mode == "time" else (ROWS, self.spatial_factor)
        split = Split(dim, split_sizes(video.shape[dim] // factor, dist.get_world_size(self._group)), self._group)
        start, length = sum(split.sizes[: split.rank]) * factor, split.sizes[split.rank] * factor
        part = None if split.is_idle else self._bands(video.narrow(dim, start, length))
        return LatentDistribution(split.gather_latents(part, self._temporal.to(self._dtype)), None)

    def _bands(self, video: torch.Tensor) -> torch.Tensor:
        B, _, T, H, W = video.shape
        m, n = self.temporal_factor, self.spatial_factor
        blocks = video.float().reshape(B, 3, T // m, m, H // n, n, W // n, n)
        bands = torch.einsum(
            "zctihjwk,dc,ai,bj,ek->zdabethw", blocks, self._color, self._temporal, self._spatial, self._spatial
        )
        bands = bands.reshape(B, self._num_bands, T // m, H // n, W // n)
        return bands[:, self._kept].to(self._dtype)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See `VideoVae.decode`; bands that were not kept are zero."""
        B, _, t, h, w = latents.shape
        m, n = self.temporal_factor, self.spatial_factor
        bands = latents.new_zeros(B, self._num_bands, t, h, w, dtype=torch.float32)
        bands[:, self._kept] = latents.float()
        blocks = torch.einsum(
            "zdabethw,dc,ai,bj,ek->zctihjwk",
            bands.reshape(B, 3, m, n, n, t, h, w),
            self._color,
            self._temporal,
            self._spatial,
            self._spatial,
        )
        return blocks.reshape(B, 3, t * m, h * n, w * n).clamp(-1, 1)


def haar_matrix(levels: int) -> torch.Tensor:
    """The orthonormal Haar basis of ``2**levels`` points, float32 ``(2**levels, 2**levels)``: one vector per row, from
    the mean to the finest differences (Haar, Math. Ann. 69, 1910)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(levels):
        averages = torch.kron(matrix, torch.tensor([1.0, 1.0], dtype=torch.float64))
        differences = torch.kron(torch.eye(len(matrix)), torch.tensor([1.0, -1.0], dtype=torch.float64))
        matrix = torch.cat([averages, differences]) / math.sqrt(2)
    return matrix.float()


def _frequencies(levels: int) -> list[float]:
    """Frequency of each row of `haar_matrix`, in cycles per two pixels; 0 for the mean."""
    return [0.0] + [2.0 ** (level - 1 - levels) for level in range(1, levels + 1) for _ in range(2 ** (level - 1))]


def _band_amplitudes(temporal_levels: int, spatial_levels: int) -> list[float]:
    """Expected standard deviation of every band, in the order colour, time, height, width."""
    lowest = (MEAN_BAND_FREQUENCY * 2.0**-spatial_levels) ** 2
    spatial = [frequency**2 for frequency in _frequencies(spatial_levels)]
    temporal = [TEMPORAL_FREQUENCY_WEIGHT * frequency**2 for frequency in _frequencies(temporal_levels)]
    return [
        color * math.sqrt(2**temporal_levels / max(t + y + x, lowest))
        for color in (GREY_AMPLITUDE, CHROMA_AMPLITUDE, CHROMA_AMPLITUDE)
        for t in temporal
        for y in spatial
        for x in spatial
    ]
