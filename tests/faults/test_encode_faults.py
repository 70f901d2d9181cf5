"""What an encoding job meets in practice: each ends as stated, and nothing is lost."""

import errno
import os
import time
from dataclasses import replace

import pytest
import torch

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoders.vae import LatentDistribution
from ttv_train.errors import UserError
from ttv_train.storage.fsspec_store import FsspecStore

CLIPS = [make_clip(number) for number in range(8)]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(encode, "ClipDecoder", FakeDecoder)

    def run(config, clips=CLIPS):
        monkeypatch.setattr(keyed_clips, "list_clips", fake_list_clips(clips))
        return encode.run(config)

    return run


def test_a_full_disk_stops_the_job_and_loses_nothing(job, tmp_path, monkeypatch):
    whole = make_config(tmp_path / "whole")
    job(whole)
    config, fsync, calls = make_config(tmp_path / "full"), os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .* to .*: No space left on device; free some space"):
        job(config)
    monkeypatch.setattr(os, "fsync", fsync)
    assert not LatentStore.exists(config.latents.path)
    finished = [name for name in stored_bytes(config) if name.startswith("shards/")]
    summary = job(config)
    assert summary.encoded + summary.reused == len(CLIPS)
    assert finished and summary.encoded < len(CLIPS)
    assert stored_bytes(config) == stored_bytes(whole)


def test_a_store_that_fails_for_a_while_delays_the_job(job, tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    config = make_config(tmp_path, latents={"path": url})
    began, failures = [], []

    def failing(method):
        def call(self, name, *arguments, **options):
            if name.startswith("shards/"):
                began.append(time.monotonic())
            if began and time.monotonic() < began[0] + 0.7:
                failures.append(name)
                error = ConnectionError(errno.ECONNRESET, "Connection reset by peer")
                if method.__name__.startswith("put"):
                    raise UserError("refused") from error
                raise error
            return method(self, name, *arguments, **options)

        return call

    for name in ("put", "put_if_absent", "read", "size"):
        monkeypatch.setattr(FsspecStore, name, failing(getattr(FsspecStore, name)))
    assert job(config).encoded == len(CLIPS)
    assert failures
    store = LatentStore.open(url)
    assert [store.read(entry).entry.key for entry in store.entries] == [entry.key for entry in store.entries]


def test_a_clip_that_is_never_finite_is_left_out_and_the_others_are_not(job, tmp_path, monkeypatch):
    bad = FakeDecoder(make_config(tmp_path).dataset).decode(CLIPS[3]).permute(3, 0, 1, 2).float() / 127.5 - 1

    class NanVae:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def encode(self, video):
            latents = self.inner.encode(video)
            for row, pixels in enumerate(video):
                if pixels.shape == bad.shape and torch.equal(pixels, bad):
                    latents.mean[row] = float("nan")
            return LatentDistribution(*latents)

    class NanEncoder(ClipEncoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.vae = NanVae(self.vae)

        @property
        def _float32_vae(self):
            return self.vae

    monkeypatch.setattr(encode, "ClipEncoder", NanEncoder)
    config = make_config(tmp_path)
    summary = job(config)
    assert (summary.encoded, summary.quarantined, summary.encoded_in_float32) == (7, 2, 1)
    store = LatentStore.open(config.latents.path)
    assert CLIPS[3].source.name not in {entry.source_name for entry in store.entries}
    assert all(store.read(entry).mean.isfinite().all() for entry in store.entries)
    assert "latents are not finite" in (tmp_path / "run/quarantine.jsonl").read_text()


def test_a_clip_of_one_frame(job, tmp_path):
    config = make_config(tmp_path, dataset={"buckets": ["1x16x24"]}, vae={"temporal_levels": 0})
    assert job(config, [replace(make_clip(1), bucket=(1, 16, 24))]).frames == 1
    (entry,) = LatentStore.open(config.latents.path).entries
    assert entry.latent_shape == (8, 1, 4, 6)


def test_a_caption_of_5000_words_is_cut_to_max_length(job, tmp_path):
    caption = " ".join(f"word{number}" for number in range(5000))
    config = make_config(tmp_path)
    job(config, [make_clip(1, caption=caption), make_clip(2, caption=" ".join(caption.split()[:4]))])
    store = LatentStore.open(config.latents.path)
    first, second = (store.read(entry) for entry in store.entries)
    assert [entry.num_text_tokens for entry in store.entries] == [4, 4]
    assert store.entries[0].caption == caption
    assert torch.equal(first.prompt_embeds, second.prompt_embeds)


@pytest.mark.parametrize(
    "change", [{"bucket": (4, 24, 16)}, {"fps": 12.0}, {"start_seconds": 1.0}, {"source_sha256": "0" * 64}]
)
def test_a_changed_crop_fps_start_or_source_makes_that_key_stale_and_no_other(job, tmp_path, change):
    config = make_config(tmp_path)
    job(config)
    before = {entry.source_name: entry.key for entry in LatentStore.open(config.latents.path).entries}
    assert job(config, [*CLIPS[:2], replace(CLIPS[2], **change), *CLIPS[3:]]).encoded == 1
    after = {entry.source_name: entry.key for entry in LatentStore.open(config.latents.path).entries}
    assert {name for name in before if before[name] != after[name]} == {CLIPS[2].source.name}


def test_equal_captions_are_embedded_once(tmp_path):
    config = make_config(tmp_path)
    encoder = ClipEncoder(config.vae, config.text_encoder, torch.device("cpu"))
    embedded, encode_text = [], encoder.text_encoder.encode

    def counted(captions):
        embedded.extend(captions)
        return encode_text(captions)

    encoder.text_encoder.encode = counted
    video = torch.zeros(4, 16, 24, 3, dtype=torch.uint8)
    for _ in range(3):
        encoder.encode([video] * 3, ["a", "b", "a"])
    assert sorted(embedded) == ["a", "b"]
