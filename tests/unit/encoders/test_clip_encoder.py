import pytest
import torch

from ttv_train.config import HashTextEncoderConfig, WaveletVaeConfig
from ttv_train.encoders import clip_encoder
from ttv_train.encoders.clip_encoder import ClipEncoder, NonFiniteError
from ttv_train.encoders.vae import LatentDistribution
from ttv_train.encoders.vae.wavelet import WaveletVae

CPU = torch.device("cpu")
VAE = WaveletVaeConfig(kind="wavelet", channels=8, dtype="float16")
TEXT = HashTextEncoderConfig(kind="hash", hidden_size=8, max_length=4)


def clips(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (4, 16, 24, 3), dtype=torch.uint8, generator=generator) for _ in range(count)]


class OverflowingVae(WaveletVae):
    """Gives NaN for clips whose first pixel is white: in half precision, or in `worst` dtypes."""

    worst = ("float16",)

    def __init__(self, config, device, group=None):
        super().__init__(config, device)
        self.overflows = config.dtype in self.worst

    def encode(self, video):
        mean, _ = super().encode(video)
        if self.overflows:
            mean[video[:, 0, 0, 0, 0] == 1] = float("nan")
        return LatentDistribution(mean, mean - 1)


@pytest.fixture
def overflowing(monkeypatch):
    monkeypatch.setattr(clip_encoder, "build_vae", OverflowingVae)
    return OverflowingVae


def test_a_batch_is_encoded_as_its_clips_are():
    encoder = ClipEncoder(VAE, TEXT, CPU)
    videos, captions = clips(3), ["a dog", "a rabbit", "a dog"]
    encoded = encoder.encode(videos, captions)
    for video, caption, one in zip(videos, captions, encoded, strict=True):
        alone = encoder.encode([video], [caption])[0]
        assert torch.allclose(one.mean.float(), alone.mean.float(), atol=1e-2)
        assert torch.equal(one.prompt_embeds, alone.prompt_embeds)
        assert one.mean.dtype == torch.float16
        assert one.logvar is None
        # Without the padding, which the model would mask.
        assert one.prompt_mask.tolist() == [True, True]
    pixels = videos[0].permute(3, 0, 1, 2)[None] / 127.5 - 1
    assert torch.allclose(encoded[0].mean, encoder.vae.encode(pixels).mean[0], atol=1e-2)


def test_an_overflow_is_encoded_again_in_float32(overflowing):
    videos = clips(2)
    videos[1][0, 0, 0] = 255
    encoder = ClipEncoder(VAE, TEXT, CPU)
    fine, repeated = encoder.encode(videos, ["a", "b"])
    assert encoder.num_float32 == 1
    expected = WaveletVae(VAE, CPU).encode(videos[1].permute(3, 0, 1, 2)[None] / 127.5 - 1).mean[0]
    assert torch.equal(repeated.mean, expected)
    assert repeated.mean.dtype == repeated.logvar.dtype == torch.float16
    assert fine.mean.isfinite().all()


def test_what_overflows_in_float32_too_is_an_error(overflowing, monkeypatch):
    monkeypatch.setattr(overflowing, "worst", ("float16", "float32"))
    videos = clips(2)
    videos[0][0, 0, 0] = 255
    bad, fine = ClipEncoder(VAE, TEXT, CPU).encode(videos, ["a", "b"])
    assert isinstance(bad, NonFiniteError)
    assert "latents are not finite in torch.float16" in str(bad)
    assert fine.mean.isfinite().all()


def test_the_null_prompt_is_the_empty_caption():
    encoder = ClipEncoder(VAE, TEXT, CPU)
    embeds, mask = encoder.encode_null_prompt()
    assert torch.equal(embeds, encoder.text_encoder.encode([""])[0][0, :1])
    assert mask.tolist() == [True]
