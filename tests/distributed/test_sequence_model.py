"""A whole model under every scheme: loss and the gradient of every parameter equal one process, plain, with activation
checkpointing, and sharded by FSDP2."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.distributed.joint_model import PLAN, Block, local_loss, make_batch, make_model
from tests.distributed.schemes import SCHEMES, build_scheme
from tests.harness import run_ranks
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel

WRAPPERS = ("plain", "checkpointed", "sharded", "checkpointed and sharded", "parallelized last")


def _checkpoint(model: nn.Module, sequence: SequenceParallel, keep_attention: bool = False) -> None:
    contexts = partial(sequence.checkpoint_contexts, keep_attention=keep_attention)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, context_fn=contexts),
        check_fn=lambda module: isinstance(module, Block),
    )


def _fully_shard(model: nn.Module, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _wrap(model: nn.Module, sequence: SequenceParallel, wrapper: str) -> None:
    if wrapper != "parallelized last":
        parallelize_sequence(model, PLAN, sequence)
    if "checkpointed" in wrapper or wrapper == "parallelized last":
        _checkpoint(model, sequence)
    if "sharded" in wrapper or wrapper == "parallelized last":
        _fully_shard(model, sequence.degree)
    if wrapper == "parallelized last":
        parallelize_sequence(model, PLAN, sequence)


def _summed_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients summed over the ranks, under the names of the unwrapped model."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if hasattr(parameter.grad, "full_tensor"):
            gradient = parameter.grad.full_tensor()
        else:
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)
        yield name.replace("_checkpoint_wrapped_module.", ""), gradient


def _train_rank(rank: int, world_size: int, scheme: str, wrapper: str, token_counts: list[int], interleaved: bool):
    sequence = build_scheme(scheme)
    model = make_model(sequence)
    _wrap(model, sequence, wrapper)
    losses = []
    for seed, tokens in enumerate(token_counts):
        losses.append(local_loss(model, sequence, make_batch(tokens, seed)))
        if not interleaved:
            losses[-1].backward()
    if interleaved:
        # All forward passes come before the first backward pass, which then recomputes with other lengths on record.
        for loss in losses:
            loss.backward()
    total = torch.stack(losses).detach()
    dist.all_reduce(total)
    return total, dict(_summed_gradients(model))


def _expected(token_counts: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    sequence = NoSequenceParallel()
    model = make_model(sequence)
    losses = [local_loss(model, sequence, make_batch(tokens, seed)) for seed, tokens in enumerate(token_counts)]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _assert_equal(results: list, token_counts: list[int]) -> None:
    losses, gradients = _expected(token_counts)
    for result_losses, result_gradients in results:
        torch.testing.assert_close(result_losses, losses, rtol=1e-10, atol=0)
        assert result_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = float((result_gradients[name] - gradient).norm() / gradient.norm())
            assert difference < 1e-10, (name, difference)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_and_gradients_equal_one_process(scheme, wrapper):
    world_size = 4 if scheme.startswith("usp") else 3
    _assert_equal(run_ranks(world_size, _train_rank, scheme, wrapper, [10], False), [10])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_fewer_tokens_than_ranks_and_changing_lengths(scheme, world_size):
    tokens = [1, 7, 3]
    _assert_equal(run_ranks(world_size, _train_rank, scheme, "checkpointed and sharded", tokens, False), tokens)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recomputation_sees_the_lengths_of_its_own_forward_pass(scheme):
    # 7 and 8 tokens leave the first of two ranks with 4 either way: it cannot tell them apart by its own tokens.
    tokens = [7, 8, 5]
    _assert_equal(run_ranks(2, _train_rank, scheme, "checkpointed", tokens, True), tokens)


def _checkpointed_bytes(rank: int, world_size: int, scheme: str, wrapper: str, keep_attention: bool):
    sequence = build_scheme(scheme)
    model = make_model(sequence)
    parallelize_sequence(model, PLAN, sequence)
    if wrapper == "checkpointed":
        _checkpoint(model, sequence, keep_attention)
    collectives.reset()
    local_loss(model, sequence, make_batch(9)).backward()
    counts = collectives.snapshot()
    counts.pop("check")
    sent = sum(count["bytes"] for count in counts.values())
    return dict(_summed_gradients(model)), sent


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recomputation_need_not_communicate_again(scheme):
    plain, again, kept = (
        run_ranks(4, _checkpointed_bytes, scheme, *arguments)
        for arguments in (("plain", False), ("checkpointed", False), ("checkpointed", True))
    )
    for rank in range(4):
        assert again[rank][1] > kept[rank][1] == plain[rank][1]
        for name, gradient in plain[rank][0].items():
            torch.testing.assert_close(kept[rank][0][name], gradient, rtol=1e-12, atol=1e-12)
