import logging
import os
import pickle
import random
import shutil

import pytest

from tests.training_parts import Parts
from ttv_train.checkpoint.load import latest_verified, load_checkpoint
from ttv_train.checkpoint.verify import refuse_damaged, verify
from ttv_train.errors import UserError


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_what_was_written_verifies(save):
    checkpoint = save(1)
    assert verify(checkpoint) == []
    assert [path.relative_to(checkpoint).as_posix() for path in files_of(checkpoint)] == [
        "ema/shard-00001-model-00001-of-00001.safetensors",
        "manifest.json",
        "model/shard-00001-model-00001-of-00001.safetensors",
        "optimizer/shard-00001-model-00001-of-00001.safetensors",
        "trainer.json",
    ]


def test_a_flipped_bit_anywhere_is_named_and_the_checkpoint_before_is_used(save, caplog):
    good, bad = save(1), save(2)
    draw = random.Random(0)
    for path in files_of(bad):
        intact = path.read_bytes()
        for position in {0, len(intact) // 2, len(intact) - 1, *(draw.randrange(len(intact)) for _ in range(3))}:
            altered = bytearray(intact)
            altered[position] ^= 1 << draw.randrange(8)
            path.write_bytes(altered)
            caplog.clear()
            assert latest_verified(bad.parent) == good
            (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert str(bad) in warning.message
            assert path.relative_to(bad).as_posix() in warning.message
            if path.name != "manifest.json":
                assert "SHA-256" in warning.message
        path.write_bytes(intact)
    assert latest_verified(bad.parent) == bad


@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_truncated_file_is_named(save, length):
    checkpoint = save(1)
    for path in files_of(checkpoint):
        intact = path.read_bytes()
        path.write_bytes(intact[:length])
        (problem,) = verify(checkpoint)
        assert problem.startswith(path.relative_to(checkpoint).as_posix())
        path.write_bytes(intact)


def test_a_missing_file_is_named(save):
    checkpoint = save(1)
    for path in files_of(checkpoint):
        intact = path.read_bytes()
        path.unlink()
        assert verify(checkpoint) == [f"{path.relative_to(checkpoint).as_posix()} is missing"]
        path.write_bytes(intact)


def test_a_missing_folder_and_an_unreadable_file_are_named(save):
    checkpoint = save(1)
    shutil.rmtree(checkpoint / "ema")
    (checkpoint / "trainer.json").unlink()
    (checkpoint / "trainer.json").mkdir()
    problems = verify(checkpoint)
    assert len(problems) == 2
    assert any(problem.startswith("ema/") and problem.endswith("is missing") for problem in problems)
    assert any(problem.startswith("trainer.json") for problem in problems)


def test_a_checkpoint_under_the_name_of_another_is_refused(save):
    checkpoint = save(1)
    assert verify(checkpoint.rename(checkpoint.with_name("step-00000009"))) == ["manifest.json is of step 1"]


def test_a_copy_under_a_name_of_the_users_own_is_as_good(save):
    checkpoint = save(1)
    refuse_damaged(checkpoint.rename(checkpoint.with_name("best")))


def test_a_tensor_file_from_elsewhere_is_refused(save):
    """It would be read together with the others."""
    checkpoint = save(1)
    shutil.copy(next((checkpoint / "model").iterdir()), checkpoint / "model" / "extra.safetensors")
    assert verify(checkpoint) == ["manifest.json does not list model/extra.safetensors"]


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [".metadata", "model/.metadata", "optimizer/__0_0.distcp", "model/model.pt"])
def test_a_pickled_file_is_never_read(save, tmp_path, name):
    checkpoint = save(1)
    (checkpoint / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    parts = Parts(seed=2)
    assert load_checkpoint(latest_verified(checkpoint.parent), parts.model, parts.optimizer, parts.ema) == {"step": 1}
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_in_place_of_tensors_is_refused(save, tmp_path):
    checkpoint = save(1)
    for path in files_of(checkpoint):
        path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match=r"manifest\.json is not a manifest"):
        latest_verified(checkpoint.parent)
    assert not (tmp_path / "sprung").exists()


def test_no_intact_checkpoint_is_an_error_and_no_checkpoint_is_none(save, tmp_path):
    assert latest_verified(tmp_path / "checkpoints") is None
    for checkpoint in (save(1), save(2)):
        (checkpoint / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000002 \(trainer.json .*step-00000001 \(trainer.json"):
        latest_verified(tmp_path / "checkpoints")


def test_a_damaged_checkpoint_that_the_user_named_is_refused(save):
    checkpoint = save(1)
    (checkpoint / "trainer.json").unlink()
    with pytest.raises(UserError, match=r"step-00000001 is refused: trainer.json is missing"):
        refuse_damaged(checkpoint)
