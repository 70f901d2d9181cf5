import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttv_train.checkpoint.layout import (
    FileRecord,
    Manifest,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
)

FILES = (
    FileRecord("model/shard-00001-model-00001-of-00001.safetensors", 120, "ab" * 32),
    FileRecord("trainer.json", 2, "cd" * 32),
)

records = st.builds(
    FileRecord,
    path=st.from_regex(r"(model|ema|optimizer)/[a-z0-9-]{1,20}\.safetensors", fullmatch=True),
    size=st.integers(0, 2**60),
    sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
)


@given(st.builds(Manifest, st.integers(0, 10**12), st.integers(1, 4096), st.lists(records, max_size=5).map(tuple)))
def test_a_manifest_is_read_as_it_was_written(manifest):
    assert Manifest.parse(manifest.dump()) == manifest


def test_every_flipped_bit_of_a_manifest_is_noticed():
    text = Manifest(100, 2, FILES).dump().encode()
    for position in range(len(text)):
        for bit in range(8):
            altered = bytearray(text)
            altered[position] ^= 1 << bit
            with pytest.raises(ValueError, match=r"not a manifest|altered"):
                Manifest.parse(bytes(altered))


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", '{"sha256": 1}', "\x80"])
def test_other_text_is_no_manifest(text):
    with pytest.raises(ValueError, match=r"not a manifest|altered"):
        Manifest.parse(text)


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr("ttv_train.checkpoint.layout.FORMAT_VERSION", 2)
    text = Manifest(1, 1, ()).dump()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 2"):
        Manifest.parse(text)


@pytest.mark.parametrize(
    "path", ["../secret.safetensors", "model/../../x.safetensors", "model/weights.pt", "/etc/passwd", "model/.metadata"]
)
def test_a_manifest_lists_nothing_but_a_checkpoints_own_files(path):
    with pytest.raises(ValueError, match="no checkpoint holds"):
        Manifest.parse(Manifest(1, 1, (FileRecord(path, 1, "00"),)).dump())


def test_the_manifest_is_plain_json():
    content = json.loads(Manifest(100, 2, FILES).dump())
    assert content["step"] == 100
    assert content["world_size"] == 2
    assert content["files"][0] == {"path": FILES[0].path, "size": 120, "sha256": "ab" * 32}


@given(st.integers(0, 10**12))
def test_names_hold_steps(step):
    assert checkpoint_step(Path("checkpoints") / checkpoint_name(step)) == step


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []
    for name in [checkpoint_name(99_999_999), checkpoint_name(100_000_000), "step-00000005", ".tmp-step-00000007-ab"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "notes.txt").touch()
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-100000000", "step-99999999", "step-00000005"]
    with pytest.raises(ValueError, match="step-5"):
        checkpoint_step(tmp_path / "step-5")
