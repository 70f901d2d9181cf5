import hashlib
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from tests.latent_samples import make_entry
from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train.data import latent_index
from ttv_train.data.latent_index import LatentIndex, put_index
from ttv_train.data.manifest import DamagedStoreError, StoredObject
from ttv_train.data.shards import LatentStore
from ttv_train.storage import open_store

ENTRIES = [replace(make_entry(number), caption=f"Ünïcode\n{number // 2}") for number in range(50)]


@pytest.fixture(params=[7, 20_000])
def rows_per_group(request, monkeypatch):
    monkeypatch.setattr(latent_index, "ROWS_PER_GROUP", request.param)


@pytest.mark.usefixtures("rows_per_group")
def test_what_is_written_is_read(tmp_path):
    store = open_store(str(tmp_path))
    stored = put_index(store, LatentIndex("vae", "text", ENTRIES))
    index = latent_index.read_index(store, type("Manifest", (), {"index": stored})())
    assert (index.vae_fingerprint, index.text_encoder_fingerprint) == ("vae", "text")
    assert list(index.entries) == ENTRIES
    assert index.entries == ENTRIES
    assert index.entries != ENTRIES[:-1]
    assert len(index.entries) == 50
    assert [index.entries[0], index.entries[-1]] == [ENTRIES[0], ENTRIES[-1]]
    assert index.entries[3:40:5] == ENTRIES[3:40:5]
    with pytest.raises(IndexError):
        index.entries[50]


@pytest.mark.usefixtures("rows_per_group")
def test_equal_entries_give_equal_bytes(tmp_path):
    first, second = (put_index(open_store(str(tmp_path / name)), LatentIndex("v", "t", ENTRIES)) for name in "ab")
    assert first == second
    assert put_index(open_store(str(tmp_path)), LatentIndex("v2", "t", ENTRIES)) != first


def test_other_tools_read_it(tmp_path):
    stored = put_index(open_store(str(tmp_path)), LatentIndex("vae", "text", ENTRIES))
    table = pq.read_table(tmp_path / stored.name)
    assert table.column("key").to_pylist() == [entry.key for entry in ENTRIES]
    assert len(set(table.column("caption_id").to_pylist())) == 25
    assert table.schema.metadata[b"vae_fingerprint"] == b"vae"


def test_a_file_that_is_no_index_is_refused(tmp_path):
    store = open_store(str(tmp_path))
    store.put("index", b"PAR1 and so on")
    digest = hashlib.sha256(b"PAR1 and so on").hexdigest()
    with pytest.raises(DamagedStoreError, match="index is damaged"):
        latent_index.read_index(store, type("M", (), {"index": StoredObject("index", 14, digest)})())


def test_readers_list_nothing(tmp_path, monkeypatch):
    write_store(tmp_path, [make_sample(1), make_sample(2)])

    def forbidden(*arguments, **options):
        raise AssertionError("a directory was listed")

    for name in ("listdir", "scandir", "walk"):
        monkeypatch.setattr(f"os.{name}", forbidden)
    store = LatentStore.open(str(tmp_path))
    assert all(store.read(entry).mean.isfinite().all() for entry in store.entries)
