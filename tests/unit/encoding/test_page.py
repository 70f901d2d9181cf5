import math

import pytest
import torch

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config
from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore
from ttv_train.encoding import page


def test_the_page_shows_previews_statistics_and_nothing_that_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "ClipDecoder", FakeDecoder)
    monkeypatch.setattr(page, "ClipDecoder", FakeDecoder)
    monkeypatch.setattr(
        keyed_clips, "list_clips", fake_list_clips([make_clip(1, caption="<script>x</script>"), make_clip(2)])
    )
    config = make_config(tmp_path, vae={"channels": None})
    encode.run(config)
    html = encode.write_preview_page(config).read_text()
    assert html.count("data:video/mp4;base64,") == 2
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "done         2 of 2 clips" in html
    assert html.count("<tr><td>") == LatentStore.open(config.latents.path).entries[0].latent_shape[0]


def test_a_lossless_vae_has_a_high_psnr(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "ClipDecoder", FakeDecoder)
    monkeypatch.setattr(page, "ClipDecoder", FakeDecoder)
    clip = make_clip(1)
    monkeypatch.setattr(keyed_clips, "list_clips", fake_list_clips([clip]))
    config = make_config(tmp_path, vae={"channels": None})
    encode.run(config)
    store, encoder = LatentStore.open(config.latents.path), encode.open_parts(config, torch.device("cpu"))[1]
    (preview,) = page.make_previews(
        store, {store.entries[0].key: clip}, config.dataset, encoder.vae, torch.device("cpu")
    )
    assert preview.psnr > 50


def test_psnr():
    video = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    assert page.psnr(video, video) == math.inf
    assert page.psnr(video, video + 255) == 0
    assert page.psnr(video, video + 1) == pytest.approx(48.13, abs=0.01)


def test_an_outlier_is_found(tmp_path):
    samples = [make_sample(number) for number in range(12)]
    for number, sample in enumerate(samples):
        generator = torch.Generator().manual_seed(number)
        sample.mean = torch.randn(sample.mean.shape, generator=generator) * (50 if number == 7 else 1)
    write_store(tmp_path, samples)
    statistics = page.measure(LatentStore.open(str(tmp_path)))
    assert max(statistics.outliers, key=lambda outlier: outlier[2])[0] == samples[7].entry.source_name
    assert len(statistics.outliers) < 4
    assert len(statistics.means) == samples[0].mean.shape[0]
