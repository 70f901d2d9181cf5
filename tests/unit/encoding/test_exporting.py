import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from safetensors.torch import load

from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train.data.shards import CorruptSampleError, LatentStore
from ttv_train.encoding import exporting
from ttv_train.encoding.exporting import export_dataset
from ttv_train.errors import UserError

SAMPLES = [make_sample(number) for number in range(5)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SAMPLES_PER_FILE", 2)
    write_store(tmp_path / "latents", SAMPLES)
    return LatentStore.open(str(tmp_path / "latents"))


def test_parquet_has_the_columns_and_values_that_fastvideo_reads(store, tmp_path):
    assert export_dataset(store, tmp_path / "out", "fastvideo") == 3
    rows = [row for path in sorted((tmp_path / "out").iterdir()) for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 5
    for row, sample in zip(rows, SAMPLES, strict=True):
        for name, tensor in (("vae_latent", sample.mean), ("text_embedding", sample.prompt_embeds)):
            read = np.frombuffer(row[f"{name}_bytes"], row[f"{name}_dtype"]).reshape(row[f"{name}_shape"])
            assert torch.equal(torch.from_numpy(read.copy()), tensor.float())
        assert (row["id"], row["caption"]) == (sample.entry.key, sample.entry.caption)
        assert (row["num_frames"], row["height"], row["width"]) == sample.entry.bucket
        assert row["duration_sec"] == sample.entry.bucket[0] / sample.entry.fps


def test_webdataset_reads_the_tar_files(store, tmp_path):
    assert export_dataset(store, tmp_path / "out", "webdataset") == 3
    urls = [str(path) for path in sorted((tmp_path / "out").iterdir())]
    rows = {row["__key__"]: row for row in webdataset.WebDataset(urls, shardshuffle=False)}
    assert rows.keys() == {sample.entry.key for sample in SAMPLES}
    for sample in SAMPLES:
        assert torch.equal(load(rows[sample.entry.key]["safetensors"])["mean"], sample.mean)


def test_nothing_is_overwritten_and_damage_is_not_passed_on(store, tmp_path):
    with pytest.raises(UserError, match="not an empty folder"):
        export_dataset(store, tmp_path, "fastvideo")
    shard = tmp_path / "latents" / store.entries[0].shard
    content = bytearray(shard.read_bytes())
    content[store.entries[3].offset + 200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptSampleError):
        export_dataset(store, tmp_path / "out", "webdataset")
