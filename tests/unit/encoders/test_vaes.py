"""What holds for every VAE, with tiny random weights where there are any."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.encoders.tiny_models import TINY_VAES, save_vae
from ttv_train.config import DiffusersVaeConfig, VaeConfig, VaeParallelConfig, WaveletVaeConfig
from ttv_train.encoders.vae import VideoVae, build_vae
from ttv_train.errors import UserError
from ttv_train.verify.peak_memory import PeakMemory

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def build(kind: str, folder: Path, dtype: str = "float32") -> VideoVae:
    if kind == "wavelet":
        return build_vae(WaveletVaeConfig(kind="wavelet", channels=24, dtype=dtype), CPU)
    save_vae(folder, kind)
    return build_vae(DiffusersVaeConfig(kind="diffusers", path=str(folder), dtype=dtype), CPU)


def config_of(kind: str, folder: Path, **parallel) -> VaeConfig:
    """Of the VAE that `build` has written, with a section `parallel`."""
    section = VaeParallelConfig(**parallel)
    if kind == "wavelet":
        return WaveletVaeConfig(kind="wavelet", channels=24, parallel=section)
    return DiffusersVaeConfig(kind="diffusers", path=str(folder), dtype="float32", parallel=section)


@pytest.mark.parametrize("kind", ["wavelet", *TINY_VAES])
class TestEveryVae:
    def test_shapes_and_types_are_as_promised(self, kind, tmp_path):
        vae = build(kind, tmp_path, "bfloat16")
        frames = 2 * vae.temporal_factor + (kind != "wavelet")
        video = torch.rand(2, 3, frames, 32, 64) * 2 - 1
        mean, logvar = vae.encode(video)
        assert mean.shape == (2, *vae.latent_shape(frames, 32, 64))
        assert mean.shape[1] == vae.latent_channels
        assert mean.dtype == torch.bfloat16
        assert logvar is None if kind == "wavelet" else logvar.shape == mean.shape
        decoded = vae.decode(mean)
        assert decoded.shape == video.shape
        assert decoded.dtype == torch.float32
        assert decoded.abs().max() <= 1
        assert not decoded.requires_grad

    def test_normalization_has_an_inverse(self, kind, tmp_path):
        vae = build(kind, tmp_path)
        latents = torch.randn(1, vae.latent_channels, 2, 3, 3)
        normalized = vae.normalization.normalize(latents)
        assert torch.allclose(vae.normalization.denormalize(normalized), latents, atol=1e-5)

    def test_refuses_sizes_with_the_nearest_that_fit(self, kind, tmp_path):
        vae = build(kind, tmp_path)
        good = 2 * vae.temporal_factor + (kind != "wavelet")
        fewer, more = good - vae.temporal_factor, good
        assert [n for n in range(1, good + 1) if vae.valid_num_frames(n)][-2:] == [fewer, more]
        with pytest.raises(UserError, match=f"dataset.buckets {good - 1}x32x64 .* takes {fewer} or {more} frames"):
            vae.latent_shape(good - 1, 32, 64)
        with pytest.raises(UserError, match=f"nearest is {good}x32x64"):
            vae.latent_shape(good, 33, 63)

    def test_fingerprint_is_stable_and_knows_the_dtype(self, kind, tmp_path):
        first, same, other = (build(kind, tmp_path, dtype) for dtype in ("float32", "float32", "bfloat16"))
        assert first.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("class_name", TINY_VAES)
def test_encodes_as_the_library_does(class_name, tmp_path):
    reference = save_vae(tmp_path, class_name)
    vae = build_vae(DiffusersVaeConfig(kind="diffusers", path=str(tmp_path), dtype="float32"), CPU)
    video = torch.rand(1, 3, 17, 32, 32) * 2 - 1
    with torch.no_grad():
        posterior = reference.encode(video).latent_dist
    mean, logvar = vae.encode(video)
    assert torch.equal(mean, posterior.mean)
    assert torch.equal(logvar, posterior.logvar)


def test_normalization_follows_each_config(tmp_path):
    normalization = {name: build(name, tmp_path / name).normalization for name in TINY_VAES}
    assert normalization["AutoencoderKLCogVideoX"].shift == (0.0,)
    assert normalization["AutoencoderKLCogVideoX"].scale == (0.7,)
    assert normalization["AutoencoderKLHunyuanVideo"].scale == (0.476986,)
    assert normalization["AutoencoderKLWan"].shift[:2] == (-0.7571, -0.7089)
    assert normalization["AutoencoderKLWan"].scale[:2] == (1 / 2.8184, 1 / 1.4541)
    assert normalization["AutoencoderKLLTXVideo"].shift == pytest.approx(torch.linspace(-1, 1, 8).tolist())
    assert normalization["AutoencoderKLLTXVideo"].scale == pytest.approx((1 / torch.linspace(0.5, 2, 8)).tolist())


def test_fingerprint_knows_weights_and_settings(tmp_path):
    fingerprint = build("AutoencoderKLCogVideoX", tmp_path).fingerprint
    weights = load_file(tmp_path / WEIGHTS)
    weights["encoder.conv_in.conv.bias"][0] += 1
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    config = DiffusersVaeConfig(kind="diffusers", path=str(tmp_path), dtype="float32")
    other_weights = build_vae(config, CPU).fingerprint
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "scaling_factor": 1.5}))
    assert len({fingerprint, other_weights, build_vae(config, CPU).fingerprint}) == 3


def test_weights_that_lack_a_tensor_are_refused(tmp_path):
    vae = build("AutoencoderKLCogVideoX", tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    del weights["encoder.conv_out.conv.weight"]
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"vae.path .*: weights lack encoder.conv_out.conv.weight"):
        vae.encode(torch.zeros(1, 3, 1, 32, 32))


@pytest.mark.parametrize("class_name", ["AutoencoderKL", "os.system", None])
def test_other_classes_are_refused(class_name, tmp_path):
    save_vae(tmp_path, "AutoencoderKLCogVideoX")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "_class_name": class_name}))
    with pytest.raises(
        UserError, match=f"{class_name} is not a supported video VAE; supported: AutoencoderKLCogVideoX"
    ):
        build_vae(DiffusersVaeConfig(kind="diffusers", path=str(tmp_path)), CPU)


def test_an_ltx_vae_that_denoises_is_refused(tmp_path):
    save_vae(tmp_path, "AutoencoderKLLTXVideo", timestep_conditioning=True)
    with pytest.raises(UserError, match="timestep_conditioning"):
        build_vae(DiffusersVaeConfig(kind="diffusers", path=str(tmp_path)), CPU)


@pytest.mark.parametrize("kind", ["wavelet", *TINY_VAES])
class TestModesOfOneRank:
    def test_chunks_with_carried_state_give_the_same_latents_under_the_same_key(self, kind, tmp_path):
        plain = build(kind, tmp_path)
        config = config_of(kind, tmp_path, mode="serial_chunks")
        chunked = build_vae(config, CPU)
        frames = 6 * plain.temporal_factor - (0 if kind == "wavelet" else plain.temporal_factor - 1)
        video = torch.rand(2, 3, frames, 32, 32) * 2 - 1
        for found, expected in zip(chunked.encode(video), plain.encode(video), strict=True):
            assert found is expected is None or torch.allclose(found, expected, atol=1e-5, rtol=0)
        assert chunked.fingerprint == plain.fingerprint

    def test_a_mode_of_several_ranks_does_not_change_the_key(self, kind, tmp_path):
        plain = build(kind, tmp_path)
        shared = build_vae(config_of(kind, tmp_path, mode="space", degree=4), CPU)
        assert shared.fingerprint == plain.fingerprint


@pytest.mark.parametrize("kind", TINY_VAES)
def test_a_clip_longer_than_memory_goes_through_in_chunks(kind, tmp_path):
    plain = build(kind, tmp_path)
    chunked = build_vae(config_of(kind, tmp_path, mode="serial_chunks"), CPU)

    def memory_besides_latents(latent_frames: int) -> int:
        video = torch.rand(1, 3, 1 + (latent_frames - 1) * plain.temporal_factor, 32, 32) * 2 - 1
        with PeakMemory() as memory:
            latents = chunked.encode(video)
        assert torch.allclose(latents.mean, plain.encode(video).mean, atol=1e-5, rtol=0)
        return memory.peak_bytes - 2 * latents.mean.nbytes

    memory_besides_latents(1)  # loads the weights
    assert memory_besides_latents(33) < 1.05 * memory_besides_latents(9)


def test_tiles_give_other_latents_under_another_key(tmp_path):
    plain = build("AutoencoderKLHunyuanVideo", tmp_path)
    tiled = build_vae(config_of("AutoencoderKLHunyuanVideo", tmp_path, mode="tiled"), CPU)
    video = torch.rand(1, 3, 1, 320, 64) * 2 - 1
    assert tiled.encode(video).mean.shape == plain.encode(video).mean.shape
    assert not torch.equal(tiled.encode(video).mean, plain.encode(video).mean)
    assert tiled.fingerprint != plain.fingerprint


def test_the_wavelet_has_no_tiles():
    with pytest.raises(ValueError, match="mode tiled"):
        WaveletVaeConfig(kind="wavelet", parallel=VaeParallelConfig(mode="tiled"))
