import os

import pytest

from tests.encode_parts import make_config
from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train.encoding.unchanged import finished_before, forget_finished, note_finished, state_of
from ttv_train.storage import open_store


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a.mp4").write_bytes(b"a")
    (folder / "b.mp4").write_bytes(b"b")
    return folder


def state(dataset, fingerprints=("vae", "text"), **settings):
    return state_of(make_config(dataset, dataset={"path": str(dataset), **settings}).dataset, fingerprints)


def test_the_state_is_that_of_files_and_settings(dataset):
    before = state(dataset)
    assert state(dataset) == before
    assert state(dataset, ("vae", "other")) != before
    assert state(dataset, fps=12) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "b.mp4").write_bytes(b"bb"),
        lambda folder: os.utime(folder / "sub/a.mp4", ns=(1, 1)),
        lambda folder: (folder / "sub/a.mp4").rename(folder / "sub/c.mp4"),
        lambda folder: (folder / "b.mp4").unlink(),
        lambda folder: (folder / "c.txt").write_text("a caption"),
    ],
)
def test_any_changed_file_changes_the_state(dataset, change):
    before = state(dataset)
    change(dataset)
    assert state(dataset) != before


def test_a_finished_job_is_known_until_something_is_lost(tmp_path):
    (entry,) = write_store(tmp_path / "latents", [make_sample(1)])
    store = open_store(str(tmp_path / "latents"))
    assert finished_before(tmp_path, store, "state") is None
    note_finished(tmp_path, store, "state")
    manifest = finished_before(tmp_path, store, "state")
    assert manifest is not None
    assert finished_before(tmp_path, store, "another state") is None
    for name in (entry.shard, manifest.index.name, manifest.null_prompt.name):
        path = tmp_path / "latents" / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert finished_before(tmp_path, store, "state") is None
        path.write_bytes(content)
    assert finished_before(tmp_path, store, "state") == manifest
    forget_finished(tmp_path)
    assert finished_before(tmp_path, store, "state") is None
