import pytest

from tests.training_parts import Parts, assert_equal
from ttv_train.checkpoint.load import latest_verified, load_checkpoint
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.checkpoint.verify import verify
from ttv_train.errors import UserError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(checkpoint):
    (checkpoint / "trainer.json").write_text("{}")


def test_state_comes_back_bit_by_bit_without_a_process_group(tmp_path):
    saved, loaded = Parts(seed=1), Parts(seed=2)
    saved.train(3)
    state = {"step": 3, "epoch": 1, "mean": 0.1 + 0.2, "text": "ü"}
    path = save_checkpoint(tmp_path, 3, saved.model, saved.optimizer, saved.ema, state, keep_last=1)
    assert load_checkpoint(path, loaded.model, loaded.optimizer, loaded.ema) == state
    assert_equal(loaded.tensors(), saved.tensors())
    saved.train(2, start=3)
    loaded.train(2, start=3)
    assert_equal(loaded.tensors(), saved.tensors())


def test_loading_replaces_the_state_of_an_optimizer_that_has_stepped(tmp_path):
    saved, loaded = Parts(seed=1), Parts(seed=2)
    saved.train(1)
    loaded.train(4)
    loaded.loss().backward()
    path = save_checkpoint(tmp_path, 1, saved.model, saved.optimizer, saved.ema, {}, keep_last=1)
    load_checkpoint(path, loaded.model, loaded.optimizer, loaded.ema)
    assert_equal(loaded.tensors(), saved.tensors())


def test_loading_from_before_the_first_step_forgets_the_state(tmp_path):
    saved, loaded = Parts(seed=1), Parts(seed=2)
    loaded.train(1)
    path = save_checkpoint(tmp_path, 0, saved.model, saved.optimizer, saved.ema, {}, keep_last=1)
    load_checkpoint(path, loaded.model, loaded.optimizer, loaded.ema)
    assert_equal(loaded.tensors(), saved.tensors())


def test_configured_settings_win_over_saved_ones(tmp_path):
    saved, loaded = Parts(seed=1), Parts(seed=2)
    saved.train(1)
    path = save_checkpoint(tmp_path, 1, saved.model, saved.optimizer, saved.ema, {}, keep_last=1)
    loaded.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    load_checkpoint(path, loaded.model, loaded.optimizer, loaded.ema)
    assert loaded.optimizer.param_groups[0]["lr"] == 0.03
    assert loaded.optimizer.param_groups[0]["weight_decay"] == 0.25


def test_the_newest_stay(save, tmp_path):
    for step in (1, 2, 3, 10, 20):
        save(step, keep_last=3)
    assert names(tmp_path / "checkpoints") == ["step-00000003", "step-00000010", "step-00000020"]
    save(30, keep_last=1)
    assert names(tmp_path / "checkpoints") == ["step-00000030"]


def test_a_damaged_checkpoint_is_not_one_of_those_that_stay(save, tmp_path):
    save(1)
    save(2)
    damage(save(3))
    save(4, keep_last=2)
    assert names(tmp_path / "checkpoints") == ["step-00000002", "step-00000004"]


def test_the_one_just_saved_stays_when_a_refused_one_is_newer(save, tmp_path):
    """The run resumed before the damaged checkpoint and has not reached its step again."""
    save(1)
    damage(save(9))
    save(5, keep_last=1)
    assert names(tmp_path / "checkpoints") == ["step-00000005"]


def test_nothing_is_removed_while_there_are_few(save, tmp_path):
    damage(save(1))
    save(2, keep_last=2)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000002"]


def test_a_refused_checkpoint_is_replaced_when_its_step_comes_again(save, tmp_path):
    damage(save(2))
    assert verify(save(2)) == []
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


def test_leftovers_of_killed_runs_are_removed_by_the_next_save(save, tmp_path):
    leftover = tmp_path / "checkpoints" / ".tmp-step-00000001-abcd"
    (leftover / "model").mkdir(parents=True)
    (leftover / "model" / "half.safetensors").write_bytes(b"half")
    assert latest_verified(tmp_path / "checkpoints") is None
    save(1)
    assert names(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(save, tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError, match=r"step-00000001 could not be written .*output_dir"):
        save(1)
