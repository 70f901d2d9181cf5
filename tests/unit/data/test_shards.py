import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import webdataset
from safetensors.torch import load

from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train.data.manifest import DamagedStoreError
from ttv_train.data.shards import CorruptSampleError, LatentSample, LatentStore, put_shard
from ttv_train.errors import UserError
from ttv_train.storage import open_store


def assert_same_tensors(read: LatentSample, written: LatentSample) -> None:
    for name in ("mean", "logvar", "prompt_embeds", "prompt_mask"):
        first, second = getattr(read, name), getattr(written, name)
        assert (first is None) == (second is None)
        assert first is None or (first.dtype == second.dtype and torch.equal(first, second))


def test_a_store_gives_back_what_was_written(tmp_path):
    samples = [make_sample(2), make_sample(1, logvar=False)]
    entries = write_store(tmp_path, samples)
    store = LatentStore.open(str(tmp_path))
    assert store.entries == entries
    assert (store.fingerprint, store.num_quarantined, len(store.manifest_digest)) == ("settings", 3, 64)
    assert store.normalization.scale == (0.5, 1.0, 1.5, 2.0)
    for entry, written in zip(store.entries, samples, strict=True):
        assert_same_tensors(store.read(entry), written)
        assert entry.source_name == written.entry.source_name
    embeds, mask = store.null_prompt()
    assert torch.equal(embeds, torch.ones(6, 8))
    assert mask.tolist() == [True] + [False] * 5


def test_a_shard_is_a_function_of_its_samples(tmp_path):
    first, _ = put_shard(open_store(str(tmp_path / "a")), [make_sample(1), make_sample(2)])
    second, _ = put_shard(open_store(str(tmp_path / "b")), [make_sample(2), make_sample(1)])
    other, _ = put_shard(open_store(str(tmp_path / "b")), [make_sample(2), make_sample(3)])
    assert first == second != other
    assert (tmp_path / "a" / first.name).read_bytes() == (tmp_path / "b" / second.name).read_bytes()
    with tarfile.open(tmp_path / "a" / first.name) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members} == {
        (0, 0, 0, "", 0o644)
    }


def test_entries_point_at_the_tensors_in_the_tar(tmp_path):
    shard, entries = put_shard(open_store(str(tmp_path)), [make_sample(number) for number in range(3)])
    with tarfile.open(tmp_path / shard.name) as tar:
        for entry in entries:
            member = tar.getmember(f"{entry.key}.safetensors")
            assert (member.offset_data, member.size) == (entry.offset, entry.length)


def test_webdataset_reads_the_shards(tmp_path):
    samples = {sample.entry.key: sample for sample in map(make_sample, range(3))}
    shard, _ = put_shard(open_store(str(tmp_path)), list(samples.values()))
    read = list(webdataset.WebDataset(str(tmp_path / shard.name), shardshuffle=False))
    assert [row["__key__"] for row in read] == sorted(samples)
    for row in read:
        written = samples[row["__key__"]]
        assert torch.equal(load(row["safetensors"])["mean"], written.mean)
        description = json.loads(row["json"])
        assert description["caption"] == written.entry.caption
        assert description["bucket"] == [4, 24, 40]
        assert "offset" not in description


def test_threads_may_share_a_store(tmp_path):
    samples = [make_sample(number) for number in range(16)]
    write_store(tmp_path, samples)
    store = LatentStore.open(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(store.read, list(store.entries) * 4))
    for got, written in zip(read, samples * 4, strict=True):
        assert_same_tensors(got, written)


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_any_flipped_bit_of_a_sample_is_noticed(tmp_path):
    bad, good = write_store(tmp_path, [make_sample(1), make_sample(2)])
    store = LatentStore.open(str(tmp_path))
    for position in range(bad.offset, bad.offset + bad.length, 37):
        flip_bit(tmp_path / bad.shard, position)
        with pytest.raises(CorruptSampleError, match=f"sample {bad.key} in {bad.shard}: its bytes") as caught:
            store.read(bad)
        assert (caught.value.key, caught.value.shard) == (bad.key, bad.shard)
        flip_bit(tmp_path / bad.shard, position)
    flip_bit(tmp_path / bad.shard, bad.offset)
    assert_same_tensors(store.read(good), make_sample(2))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path, entry: path.write_bytes(path.read_bytes()[: entry.offset + 10]), "10 bytes of"),
        (lambda path, entry: path.unlink(), "cannot be read"),
    ],
)
def test_a_shard_that_is_cut_or_gone_is_noticed(tmp_path, damage, reason):
    (entry,) = write_store(tmp_path, [make_sample(1)])
    store = LatentStore.open(str(tmp_path))
    damage(tmp_path / entry.shard, entry)
    with pytest.raises(CorruptSampleError, match=reason):
        store.read(entry)


def test_nothing_is_there_before_the_manifest(tmp_path):
    assert not LatentStore.exists("")
    assert not LatentStore.exists(str(tmp_path))
    with pytest.raises(UserError, match=f"latents.path {tmp_path}: no manifest.json in it; run `ttv-train encode`"):
        LatentStore.open(str(tmp_path))
    with pytest.raises(UserError, match=r"latents.path is not set"):
        LatentStore.open("")
    write_store(tmp_path, [make_sample(1)])
    assert LatentStore.exists(str(tmp_path))


def test_a_damaged_manifest_index_or_null_prompt_is_refused(tmp_path):
    write_store(tmp_path, [make_sample(1)])
    for pattern in ("index-*", "null-prompt-*"):
        (path,) = tmp_path.glob(pattern)
        flip_bit(path, 100)
        with pytest.raises(DamagedStoreError, match=f"{path.name} is damaged; run `ttv-train encode`"):
            LatentStore.open(str(tmp_path)).null_prompt()
        flip_bit(path, 100)
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(DamagedStoreError, match=f"{path.name} is missing"):
            LatentStore.open(str(tmp_path)).null_prompt()
        path.write_bytes(content)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(DamagedStoreError, match=r"manifest.json is damaged"):
        LatentStore.open(str(tmp_path))


@pytest.mark.parametrize("field", ["format_version", "decode_version"])
def test_another_version_is_refused(tmp_path, field):
    write_store(tmp_path, [make_sample(1)])
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), field: 0}))
    with pytest.raises(DamagedStoreError, match="encoded by another version"):
        LatentStore.open(str(tmp_path))


def test_the_manifest_digest_changes_with_any_sample(tmp_path):
    digests = set()
    for number in (1, 2):
        write_store(tmp_path / str(number), [make_sample(number)])
        digests.add(LatentStore.open(str(tmp_path / str(number))).manifest_digest)
    assert len(digests) == 2


def test_a_url_works_as_a_folder_does():
    sample = make_sample(1)
    entries = write_store("memory://latents-of-a-test", [sample])
    assert_same_tensors(LatentStore.open("memory://latents-of-a-test").read(entries[0]), sample)
