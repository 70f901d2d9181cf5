import os
import time
from pathlib import Path

import pytest

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.data.shards import LatentStore
from ttv_train.data.units import UnitRecord, put_record
from ttv_train.encoding.leases import Leases
from ttv_train.errors import UserError
from ttv_train.storage import open_store


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(encode, "ClipDecoder", FakeDecoder)

    def with_clips(clips):
        monkeypatch.setattr(keyed_clips, "list_clips", fake_list_clips(clips))

    return with_clips


def age(config) -> None:
    """Makes everything in the store two days old."""
    for path in Path(config.latents.path).rglob("*"):
        os.utime(path, (time.time() - 48 * 3600,) * 2)


def test_status_tells_done_from_missing_and_stale(job, tmp_path):
    config = make_config(tmp_path)
    job([make_clip(number) for number in range(6)])
    status = encode.status(config)
    assert (status.wanted, status.committed, status.missing, status.stale, status.quarantined) == (6, 0, 6, 0, 1)
    encode.run(config)
    job([make_clip(number) for number in range(2, 12)])
    status = encode.status(config)
    assert (status.wanted, status.committed, status.missing, status.stale) == (10, 4, 6, 2)
    assert "done         4 of 10 clips, 4 of them committed" in str(status)
    assert "time left" not in str(status)


def test_status_sees_workers_and_their_units(job, tmp_path):
    config = make_config(tmp_path)
    job([make_clip(number) for number in range(6)])
    store, encoder = encode.open_parts(config, "cpu")
    plan = encode.make_plan(config, store, encoder)
    put_record(store, plan.units[0], UnitRecord(None, [], []))
    leases = Leases(store, f"{plan.units[0].folder}/leases", 60)
    leases.claim(plan.units[1].name)
    status = encode.status(config)
    assert (status.finished, status.workers) == (len(plan.units[0].clips), 1)
    leases.release_all()
    assert encode.status(config).workers == 0


def test_gc_removes_what_nothing_refers_to(job, tmp_path):
    config = make_config(tmp_path)
    job([make_clip(number) for number in range(4)])
    encode.run(config)
    changed = make_config(tmp_path, vae={"channels": 4})
    encode.run(changed)
    before = stored_bytes(changed)
    assert encode.remove_garbage(changed).startswith("removed 0 of")  # all of it is young
    assert stored_bytes(changed) == before
    (tmp_path / "latents/notes.txt").write_text("mine")
    age(changed)
    encode.remove_garbage(changed)
    store = LatentStore.open(changed.latents.path)
    assert all(store.read(entry).mean.isfinite().all() for entry in store.entries)
    kept = stored_bytes(changed)
    shards = {entry.shard for entry in store.entries}
    assert {name for name in kept if name.startswith("shards/")} == shards
    assert len([name for name in kept if name.startswith(("index-", "null-prompt-"))]) == 2
    assert "notes.txt" in kept
    assert len(kept) < len(before)


def test_gc_keeps_what_unfinished_jobs_have_done(job, tmp_path, monkeypatch):
    config = make_config(tmp_path)
    job([make_clip(1)])
    encode.run(config)
    job([make_clip(number) for number in range(6)])
    monkeypatch.setattr(encode, "commit", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encode.run(config)
    before = stored_bytes(config)
    age(config)
    encode.remove_garbage(config)
    assert stored_bytes(config) == before


def test_gc_needs_a_committed_dataset(tmp_path):
    config = make_config(tmp_path)
    open_store(config.latents.path).put("shards/a.tar", b"a")
    with pytest.raises(UserError, match=r"no manifest.json"):
        encode.remove_garbage(config)
