import math

import pytest
import torch

from ttv_train.config import WaveletVaeConfig
from ttv_train.encoders.vae.wavelet import COLOR_TRANSFORM, WaveletVae, haar_matrix
from ttv_train.errors import UserError

CPU = torch.device("cpu")


def wavelet(**settings) -> WaveletVae:
    return WaveletVae(WaveletVaeConfig(kind="wavelet", **settings), CPU)


def video(frames: int = 8, height: int = 32, width: int = 64) -> torch.Tensor:
    return torch.rand(2, 3, frames, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("matrix", [torch.tensor(COLOR_TRANSFORM), *map(haar_matrix, range(6))])
def test_the_bases_are_orthonormal(matrix):
    assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-6)


def test_haar_of_four_points_as_written_in_textbooks():
    a = math.sqrt(0.5)
    expected = [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, -0.5, -0.5], [a, -a, 0, 0], [0, 0, a, -a]]
    assert torch.allclose(haar_matrix(2), torch.tensor(expected))


@pytest.mark.parametrize(("spatial", "temporal"), [(1, 0), (2, 1), (3, 1), (3, 3), (5, 0)])
def test_every_band_kept_is_invertible_and_keeps_the_energy(spatial, temporal):
    vae = wavelet(spatial_levels=spatial, temporal_levels=temporal)
    latents = vae.encode(video()).mean
    assert latents.numel() == video().numel()
    assert latents.square().sum() == pytest.approx(video().square().sum().item(), rel=1e-5)
    assert torch.allclose(vae.decode(latents), video(), atol=2e-6)


def test_low_bands_are_the_orthogonal_projection():
    vae = wavelet(channels=24)
    x = 0.3 * video()  # so that nothing is clamped
    projected = vae.decode(vae.encode(x).mean)
    other = vae.decode(0.1 * torch.randn(vae.encode(x).mean.shape))
    assert torch.allclose(vae.decode(vae.encode(projected).mean), projected, atol=1e-6)
    assert ((x - projected) * other).sum().abs() < 1e-2 < ((x - projected).square().sum())


def test_channels_are_a_prefix_of_the_bands_and_the_first_is_the_mean():
    every, few = wavelet(), wavelet(channels=7)
    assert torch.equal(few.encode(video()).mean, every.encode(video()).mean[:, :7])
    assert few.normalization.scale == every.normalization.scale[:7]
    assert list(every.normalization.scale) == sorted(every.normalization.scale)
    grey = torch.full((1, 3, 8, 32, 64), 0.5)
    bands = every.encode(grey).mean
    assert torch.allclose(bands[:, 0], torch.tensor(0.5 * math.sqrt(3 * 2 * 8 * 8)))
    assert bands[:, 1:].abs().max() < 1e-5


def test_more_channels_than_bands_are_refused():
    with pytest.raises(UserError, match=r"vae.channels 385: .* give 384 bands"):
        wavelet(channels=385)


def test_fingerprint_knows_every_setting_but_not_how_it_was_written():
    settings = [{}, {"channels": 24}, {"spatial_levels": 2}, {"temporal_levels": 0}, {"dtype": "bfloat16"}]
    assert len({wavelet(**setting).fingerprint for setting in settings}) == len(settings)
    assert wavelet(channels=384).fingerprint == wavelet().fingerprint
