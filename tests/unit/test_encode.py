import json
import threading
from pathlib import Path

import pytest
import torch

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore
from ttv_train.encode import EncodeSummary
from ttv_train.encoders import encoder_fingerprint, encoder_fingerprints
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoding import decoding
from ttv_train.errors import UserError

CPU = torch.device("cpu")


class CountingDecoder(FakeDecoder):
    decoded: list[str]

    def decode(self, clip):
        CountingDecoder.decoded.append(clip.source.name)
        return super().decode(clip)


@pytest.fixture
def job(monkeypatch):
    """Runs an encoding job on the given clips; `job.decoded` are the names it decoded."""
    monkeypatch.setattr(encode, "ClipDecoder", CountingDecoder)

    def run(config, clips) -> EncodeSummary:
        monkeypatch.setattr(keyed_clips, "list_clips", fake_list_clips(clips))
        run.decoded = CountingDecoder.decoded = []
        return encode.run(config)

    return run


def quarantine(config) -> list[tuple[str, str, str]]:
    rows = map(json.loads, (Path(config.output_dir) / "quarantine.jsonl").read_text().splitlines())
    return [(row["name"], row["reason"], row["stage"]) for row in rows]


def test_every_clip_becomes_a_sample_in_the_order_of_the_dataset(job, tmp_path):
    config, clips = make_config(tmp_path), [make_clip(number) for number in range(8)]
    summary = job(config, clips)
    assert (summary.encoded, summary.reused, summary.quarantined, summary.frames) == (8, 0, 1, 32)
    assert summary.shards == 3
    store = LatentStore.open(config.latents.path)
    assert [entry.source_name for entry in store.entries] == [clip.source.name for clip in clips]
    assert store.fingerprint == encoder_fingerprint(config)
    assert store.num_quarantined == 1
    encoder = ClipEncoder(config.vae, config.text_encoder, CPU)
    assert store.normalization == encoder.vae.normalization
    assert torch.equal(store.null_prompt()[0], encoder.encode_null_prompt()[0])
    for entry, clip in zip(store.entries, clips, strict=True):
        sample = store.read(entry)
        (alone,) = encoder.encode([FakeDecoder(config.dataset).decode(clip)], [clip.source.caption])
        assert torch.allclose(sample.mean, alone.mean, atol=1e-5)
        assert torch.equal(sample.prompt_embeds, alone.prompt_embeds)
        assert entry.latent_shape == tuple(sample.mean.shape)
        assert (entry.caption, entry.bucket, entry.num_text_tokens) == (clip.source.caption, clip.bucket, 2)


def test_first_frames_are_stored_where_they_are_asked_for(job, tmp_path):
    clips = [make_clip(number) for number in range(2)]
    plain, framed = make_config(tmp_path), make_config(tmp_path, first_frame={"enabled": True})
    job(plain, clips)
    assert LatentStore.open(plain.latents.path).encoders != encoder_fingerprints(framed)
    # They are part of what a clip is encoded to, so all clips are encoded again.
    assert job(framed, clips).encoded == 2
    store = LatentStore.open(framed.latents.path)
    assert (store.fingerprint, store.encoders) == (encoder_fingerprint(framed), encoder_fingerprints(framed))
    vae = ClipEncoder(framed.vae, framed.text_encoder, CPU).vae
    for entry, clip in zip(store.entries, clips, strict=True):
        sample = store.read(entry)
        video = FakeDecoder(framed.dataset).decode(clip)[None].permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        video[:, :, 1:] = 0
        torch.testing.assert_close(sample.first_frame.latents, vae.encode(video).mean[0])
        assert sample.first_frame.embeds is None


def test_only_the_manifest_and_what_it_names_stay(job, tmp_path):
    config = make_config(tmp_path)
    job(config, [make_clip(number) for number in range(8)])
    manifest = json.loads(stored_bytes(config)["manifest.json"])
    named = [manifest["index"], manifest["null_prompt"], *manifest["shards"]]
    assert sorted(stored_bytes(config)) == sorted(["manifest.json", *(item["name"] for item in named)])


def test_a_rerun_does_nothing(job, tmp_path):
    config, clips = make_config(tmp_path), [make_clip(number) for number in range(4)]
    job(config, clips)
    before = stored_bytes(config)
    summary = job(config, clips)
    assert (summary.encoded, summary.reused, job.decoded) == (0, 4, [])
    assert stored_bytes(config) == before
    assert quarantine(config) == [("notes.mp4", "no video stream", "probe")]


def test_only_what_is_new_is_encoded(job, tmp_path):
    config = make_config(tmp_path)
    job(config, [make_clip(1), make_clip(2)])
    old_shards = {name for name in stored_bytes(config) if name.startswith("shards/")}
    summary = job(config, [make_clip(5), make_clip(1), make_clip(2)])
    assert (summary.encoded, summary.reused, job.decoded) == (1, 2, ["05.mp4"])
    entries = LatentStore.open(config.latents.path).entries
    assert [entry.source_name for entry in entries] == ["05.mp4", "01.mp4", "02.mp4"]
    assert {entry.shard for entry in entries[1:]} == old_shards


@pytest.mark.parametrize(
    "change",
    [
        {"vae": {"channels": 9}},
        {"vae": {"dtype": "bfloat16"}},
        {"text_encoder": {"max_length": 5}},
        {"text_encoder": {"dtype": "float16"}},
    ],
)
def test_a_changed_encoder_makes_everything_stale(job, tmp_path, change):
    clips = [make_clip(1), make_clip(2)]
    job(make_config(tmp_path), clips)
    before = LatentStore.open(str(tmp_path / "latents"))
    changed = make_config(tmp_path, **change)
    assert before.fingerprint != encoder_fingerprint(changed)
    summary = job(changed, clips)
    assert (summary.encoded, summary.reused) == (2, 0)
    after = LatentStore.open(str(tmp_path / "latents"))
    assert after.fingerprint == encoder_fingerprint(changed)
    assert not {entry.key for entry in before.entries} & {entry.key for entry in after.entries}


@pytest.mark.parametrize(
    "changed", [make_clip(2, caption="another caption"), make_clip(2, start_seconds=0.5), make_clip(7, name="02.mp4")]
)
def test_a_changed_clip_alone_is_stale(job, tmp_path, changed):
    config = make_config(tmp_path)
    job(config, [make_clip(1), make_clip(2)])
    before = LatentStore.open(config.latents.path).entries
    summary = job(config, [make_clip(1), changed])
    assert (summary.encoded, summary.reused, job.decoded) == (1, 1, ["02.mp4"])
    after = LatentStore.open(config.latents.path).entries
    assert after[0] == before[0]
    assert after[1].key != before[1].key


@pytest.mark.parametrize("dataset", [{"fps": 12}, {"buckets": ["4x16x24"]}, {"max_clips_per_video": 2}])
def test_changed_cutting_makes_the_dataset_stale(tmp_path, dataset):
    assert encoder_fingerprint(make_config(tmp_path)) != encoder_fingerprint(make_config(tmp_path, dataset=dataset))


def test_a_renamed_video_is_not_encoded_again(job, tmp_path):
    config = make_config(tmp_path)
    job(config, [make_clip(1)])
    summary = job(config, [make_clip(1, name="renamed.mp4")])
    assert (summary.encoded, summary.reused) == (0, 1)
    assert LatentStore.open(config.latents.path).entries[0].source_name == "renamed.mp4"


def test_bad_clips_are_quarantined_and_the_others_encoded(job, tmp_path):
    config = make_config(tmp_path)
    broken = make_clip(2, name="broken.mp4")
    summary = job(config, [make_clip(1), broken, make_clip(4), make_clip(1, name="copy.mp4")])
    assert (summary.encoded, summary.quarantined) == (2, 3)
    assert quarantine(config) == [
        ("notes.mp4", "no video stream", "probe"),
        ("copy.mp4", "same content and caption as 01.mp4", "encode"),
        ("broken.mp4", "no frame can be decoded", "decode"),
    ]
    entries = LatentStore.open(config.latents.path).entries
    assert [entry.source_name for entry in entries] == ["01.mp4", "04.mp4"]


def test_bad_clips_are_tried_again(job, tmp_path):
    config = make_config(tmp_path)
    job(config, [make_clip(1), make_clip(2, name="broken.mp4")])
    before = stored_bytes(config)
    job(config, [make_clip(1), make_clip(2, name="broken.mp4")])
    assert job.decoded == ["broken.mp4"]
    assert stored_bytes(config) == before
    job(config, [make_clip(1), make_clip(2, name="mended.mp4")])
    assert [entry.source_name for entry in LatentStore.open(config.latents.path).entries] == ["01.mp4", "mended.mp4"]


def test_a_dataset_without_a_good_clip_is_an_error(job, tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(UserError, match=r"no clip could be encoded; .*quarantine.jsonl says why"):
        job(config, [make_clip(1, name="broken.mp4")])
    assert not LatentStore.exists(config.latents.path)
    assert ("broken.mp4", "no frame can be decoded", "decode") in quarantine(config)


def test_a_bucket_that_does_not_suit_the_vae_is_an_error(job, tmp_path):
    config = make_config(tmp_path, dataset={"buckets": ["5x16x24"]})
    with pytest.raises(UserError, match=r"dataset.buckets 5x16x24 does not suit the VAE: it takes 4 or 6 frames"):
        job(config, [])


def test_latents_need_a_place(job, tmp_path):
    with pytest.raises(UserError, match=r"latents.path is not set"):
        job(make_config(tmp_path, latents={"path": ""}), [])


@pytest.mark.parametrize("damage", ["shard", "index", "manifest"])
def test_what_is_lost_is_encoded_again(job, tmp_path, damage):
    config, clips = make_config(tmp_path), [make_clip(number) for number in range(4)]
    job(config, clips)
    before = stored_bytes(config)
    names = {"shard": next(name for name in before if name.startswith("shards/")), "manifest": "manifest.json"}
    names["index"] = next(name for name in before if name.startswith("index-"))
    (Path(config.latents.path) / names[damage]).write_bytes(b"{")
    assert job(config, clips).encoded >= 1
    store = LatentStore.open(config.latents.path)
    assert [entry.source_name for entry in store.entries] == [clip.source.name for clip in clips]
    assert all(store.read(entry).mean.isfinite().all() for entry in store.entries)


@pytest.mark.parametrize("prefix", ["index-", "null-prompt-", "shards/"])
def test_a_flipped_byte_is_mended(job, tmp_path, prefix):
    """At the next run; a shard, of which only the size is looked at, once it is removed as its error says."""
    config, clips = make_config(tmp_path), [make_clip(number) for number in range(4)]
    job(config, clips)
    before = stored_bytes(config)
    damaged = Path(config.latents.path) / next(name for name in before if name.startswith(prefix))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    if prefix == "shards/":
        damaged.unlink()
    job(config, clips)
    assert stored_bytes(config) == before


def test_batches_are_of_one_bucket_and_bounded(job, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS_PER_BATCH", 2 * 4 * 16 * 24)
    sizes = []
    encode_batch = encode.encode_batch

    def spy(encoder, clips, videos, rejected):
        sizes.append((len(clips), len({clip.bucket for _, clip in clips})))
        return encode_batch(encoder, clips, videos, rejected)

    monkeypatch.setattr(encode, "encode_batch", spy)
    job(make_config(tmp_path, latents={"samples_per_shard": 8}), [make_clip(number) for number in range(8)])
    assert max(sizes) == (2, 1)
    assert sum(size for size, _ in sizes) == 8


def test_a_running_reader_is_not_disturbed(job, tmp_path):
    config = make_config(tmp_path)
    job(config, [make_clip(1), make_clip(2)])
    store = LatentStore.open(config.latents.path)
    failures = []

    def read() -> None:
        for entry in list(store.entries) * 50:
            try:
                store.read(entry)
            except Exception as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    job(make_config(tmp_path, vae={"channels": 4}), [make_clip(number) for number in range(6)])
    reader.join()
    assert not failures
