"""Checkpoints on real ranks: written by N, read by M, and never half believed."""

import errno
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import run_ranks
from tests.training_parts import Parts, assert_equal
from ttv_train.checkpoint import tensors as checkpoint_tensors
from ttv_train.checkpoint.layout import list_checkpoints
from ttv_train.checkpoint.load import latest_verified, load_checkpoint, load_weights
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.checkpoint.tensors import read_tensors, write_tensors
from ttv_train.checkpoint.verify import verify
from ttv_train.ema import Ema
from ttv_train.errors import UserError

WORLD_SIZES = (1, 2, 3, 4)


def save(rank, world_size, folder, step, options):
    parts = Parts(seed=1, **options)
    parts.train(2)
    if not options.get("reshard_after_forward", True):
        parts.loss()  # leaves the blocks gathered
    parts.optimizer.param_groups[0]["lr"] = 0.0123
    save_checkpoint(folder, step, parts.model, parts.optimizer, parts.ema, {"step": step, "x": 0.1}, keep_last=2)
    return parts.tensors()


def load(rank, world_size, folder, options):
    parts = Parts(seed=2, **options)
    path = latest_verified(folder)
    state = load_checkpoint(path, parts.model, parts.optimizer, parts.ema)
    return path.name, state, parts.learning_rates, parts.tensors()


def train_on(rank, world_size, folder):
    """Two more steps after loading, or four without."""
    parts = Parts(seed=1)
    if folder is None:
        parts.train(4)
    else:
        learning_rates = parts.learning_rates
        load_checkpoint(latest_verified(folder), parts.model, parts.optimizer, parts.ema)
        for group, learning_rate in zip(parts.optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = learning_rate
        parts.train(2, start=2)
    return parts.tensors()


@pytest.mark.parametrize("writers", WORLD_SIZES)
def test_written_on_n_ranks_and_read_on_m(tmp_path, writers):
    written = run_ranks(writers, save, tmp_path, 7, {})
    for readers in WORLD_SIZES:
        for name, state, learning_rates, tensors in run_ranks(readers, load, tmp_path, {}):
            assert name == "step-00000007"
            assert state == {"step": 7, "x": 0.1}
            assert learning_rates == [0.0123, 0.01]
            assert_equal(tensors, written[0])


@pytest.mark.parametrize(
    ("written_with", "read_with"),
    [({"wrap": True}, {}), ({}, {"wrap": True}), ({"reshard_after_forward": False}, {"reshard_after_forward": False})],
)
def test_wrappers_and_gathered_blocks_do_not_matter(tmp_path, written_with, read_with):
    written = run_ranks(2, save, tmp_path, 1, written_with)
    for *_, tensors in run_ranks(3, load, tmp_path, read_with):
        assert_equal(tensors, written[0])


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    run_ranks(2, save, tmp_path, 2, {})
    for resumed, uninterrupted in zip(run_ranks(2, train_on, tmp_path), run_ranks(2, train_on, None), strict=True):
        assert_equal(resumed, uninterrupted)


def save_without_optimizer_state_or_average(rank, world_size, folder):
    parts = Parts(seed=1)
    save_checkpoint(folder, 0, parts.model, parts.optimizer, None, {}, keep_last=1)


def load_unstepped(rank, world_size, folder, with_average):
    parts = Parts(seed=2)
    load_checkpoint(latest_verified(folder), parts.model, parts.optimizer, parts.ema if with_average else None)
    return len(parts.optimizer.state)


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path):
    run_ranks(2, save_without_optimizer_state_or_average, tmp_path)
    assert run_ranks(1, load_unstepped, tmp_path, False) == [0]


def user_error(rank, world_size, function, *args):
    """The message of the UserError that the call raises on this rank."""
    with pytest.raises(UserError) as caught:
        function(rank, world_size, *args)
    return str(caught.value)


def test_a_checkpoint_without_average_is_not_taken_for_one_with(tmp_path):
    run_ranks(2, save_without_optimizer_state_or_average, tmp_path)
    for message in run_ranks(2, user_error, load_unstepped, tmp_path, True):
        assert "ema.enabled" in message


def test_another_model_is_refused_on_every_rank(tmp_path):
    run_ranks(2, save, tmp_path, 1, {})
    messages = run_ranks(3, user_error, load, tmp_path, {"width": 8})
    assert len(set(messages)) == 1
    assert "(1, 1, 8)" in messages[0]
    assert "(1, 1, 7)" in messages[0]
    assert "model section" in messages[0]


def weights(rank, world_size, folder, use_ema):
    parts = Parts(seed=2)
    load_weights(latest_verified(folder), parts.model, use_ema)
    return {name: tensor for name, tensor in parts.tensors().items() if name.startswith("model.")}


def test_weights_alone_trained_or_averaged(tmp_path):
    written = run_ranks(3, save, tmp_path, 1, {})[0]
    trained = {name: tensor for name, tensor in written.items() if name.startswith("model.")}
    averaged = {name: written.get(name.replace("model.", "ema.", 1), tensor) for name, tensor in trained.items()}
    assert not torch.equal(trained["model.head.weight"], averaged["model.head.weight"])
    for tensors in run_ranks(2, weights, tmp_path, False):
        assert_equal(tensors, trained)
    for tensors in run_ranks(2, weights, tmp_path, True):
        assert_equal(tensors, averaged)


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def check(rank, world_size, folder):
    return latest_verified(folder), [verify(path) for path in list_checkpoints(folder)]


def test_ranks_agree_on_what_is_damaged(tmp_path):
    for step in (1, 2):
        run_ranks(2, save, tmp_path, step, {})
    victims = sorted((tmp_path / "step-00000002").glob("*/*.safetensors"))[:3]
    for victim in victims:
        flip_bit(victim, -1)
    for newest, (problems_2, problems_1) in run_ranks(3, check, tmp_path):
        assert newest.name == "step-00000001"
        assert problems_1 == []
        assert len(problems_2) == len(victims)
        assert all(any(victim.name in problem for problem in problems_2) for victim in victims)


def fail_to_write(rank, world_size, folder, bad_rank):
    parts = Parts(seed=1)
    parts.train(1)

    class FullDisk(checkpoint_tensors.HuggingFaceStorageWriter):
        def write_data(self, plan, planner):
            if rank == bad_rank and self.path.name == "ema":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write_data(plan, planner)

    save_checkpoint(folder, 1, parts.model, parts.optimizer, parts.ema, {}, keep_last=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_tensors, "HuggingFaceStorageWriter", FullDisk)
        save_checkpoint(folder, 2, parts.model, parts.optimizer, parts.ema, {}, keep_last=1)


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path, bad_rank):
    messages = run_ranks(3, user_error, fail_to_write, tmp_path, bad_rank)
    assert len(set(messages)) == 1
    assert f"rank {bad_rank}" in messages[0]
    assert "No space left" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert latest_verified(tmp_path) == tmp_path / "step-00000001"


def lose_a_file(rank, world_size, folder, lost):
    """Rank 0 does not see a file that another rank wrote, as on disks that are not shared."""
    parts = Parts(seed=1)

    def write_and_lose(part, tensors):
        write_tensors(part, tensors)
        if rank == 0:
            (file,) = part.glob(f"shard-0000{lost + 1}-*")
            file.unlink()
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttv_train.checkpoint.save.write_tensors", write_and_lose)
        save_checkpoint(folder, 1, parts.model, parts.optimizer, parts.ema, {}, keep_last=1)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_shard_that_is_not_there_is_noticed_before_the_commit(tmp_path, lost):
    for message in run_ranks(3, user_error, lose_a_file, tmp_path, lost):
        assert "use a shared disk" in message
    assert list(tmp_path.iterdir()) == []


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8)
LAYOUTS = ("plain", "rows", "columns", "replicated")

specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple),
        st.sampled_from(DTYPES),
        st.sampled_from(LAYOUTS),
        st.sampled_from(LAYOUTS),
    ),
    min_size=1,
    max_size=6,
)


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def laid_out(tensor, layout, mesh):
    """A tensor as a model may hold it: the same on every rank, or a shard of it."""
    if layout == "plain" or tensor.dim() == 0 or (layout == "columns" and tensor.dim() < 2):
        return tensor
    placement = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[layout]
    # Where there are four ranks: two replicas of two shards.
    return distribute_tensor(tensor, mesh, [Replicate(), placement] if mesh.ndim == 2 else [placement])


def mesh_of(world_size):
    return init_device_mesh("cpu", (2, 2) if world_size == 4 else (world_size,))


def write_specs(rank, world_size, folder, tensor_specs):
    mesh = mesh_of(world_size)
    write_tensors(
        folder,
        {
            f"tensor.{i}": laid_out(values(shape, dtype, i), layout, mesh)
            for i, (shape, dtype, layout, _) in enumerate(tensor_specs)
        },
    )


def read_specs(rank, world_size, folder, tensor_specs):
    mesh = mesh_of(world_size)
    tensors = {
        f"tensor.{i}": laid_out(torch.zeros(shape, dtype=dtype), layout, mesh)
        for i, (shape, dtype, _, layout) in enumerate(tensor_specs)
    }
    read_tensors(folder, tensors)
    for i, (shape, dtype, *_) in enumerate(tensor_specs):
        found = tensors[f"tensor.{i}"]
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, values(shape, dtype, i)), (i, shape, dtype)
    dist.barrier()
    return sum(math.prod(shape) for shape, *_ in tensor_specs)


@settings(max_examples=25, deadline=None)
@given(tensor_specs=specs, writers=st.sampled_from(WORLD_SIZES), readers=st.sampled_from(WORLD_SIZES))
def test_any_tensor_in_any_layout(tmp_path_factory, tensor_specs, writers, readers):
    folder = tmp_path_factory.mktemp("tensors")
    run_ranks(writers, write_specs, folder, tensor_specs)
    run_ranks(readers, read_specs, folder, tensor_specs)


def write_in_small_files(rank, world_size, folder):
    parts, copy = Parts(seed=1), Parts(seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_tensors, "FILE_BYTES", 100)
        write_tensors(folder, parts.model.state_dict())
    read_tensors(folder, copy.model.state_dict())
    copy.ema, parts.ema = Ema(copy.model, 0.9), Ema(parts.model, 0.9)
    assert_equal(copy.tensors(), parts.tensors())


def test_many_small_files_instead_of_a_large_one(tmp_path):
    run_ranks(2, write_in_small_files, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
