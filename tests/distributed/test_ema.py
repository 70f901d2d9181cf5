"""The average of sharded weights is the average of whole ones, and what is applied is what computes."""

import pytest
import torch

from tests.harness import run_ranks
from tests.training_parts import Parts, assert_equal


def averages_and_losses(rank, world_size, options):
    """Whole averages, and the loss with trained weights, with the average, and with trained weights again."""
    parts = Parts(seed=1, **options)
    parts.train(4)
    averages = {name: tensor for name, tensor in parts.tensors().items() if name.startswith("ema.")}
    losses = []
    with torch.no_grad():
        losses.append(parts.loss().item())
        with parts.ema.applied(parts.model):
            losses.append(parts.loss().item())
        losses.append(parts.loss().item())
    parts.train(1, start=4)
    return averages, losses, {name: tensor for name, tensor in parts.tensors().items() if name.startswith("ema.")}


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"wrap": True}], ids=["zero3", "zero2", "wrapped"]
)
def test_sharded_equals_whole(world_size, options):
    parts = Parts(seed=1)
    parts.train(4)
    expected = [parts.loss().item()]
    with parts.ema.applied(parts.model):
        expected.append(parts.loss().item())
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)
    whole = {f"ema.{name}": tensor.clone() for name, tensor in parts.ema.state_dict().items()}
    parts.train(1, start=4)

    for averages, losses, later in run_ranks(world_size, averages_and_losses, options):
        assert averages.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(averages[name], tensor)
        assert losses[0] == losses[2]
        assert losses[:2] == pytest.approx(expected, rel=1e-5)
        for name, tensor in parts.ema.state_dict().items():
            torch.testing.assert_close(later[f"ema.{name}"], tensor)


def shard_bytes(rank, world_size):
    parts = Parts(seed=1)
    before = {name: tensor.to_local().clone() for name, tensor in parts.ema.state_dict().items()}
    with parts.ema.applied(parts.model):
        pass
    assert_equal({name: tensor.to_local() for name, tensor in parts.ema.state_dict().items()}, before)
    return sum(tensor.numel() for tensor in before.values())


def test_ranks_share_the_average():
    parts = Parts(seed=1)
    assert sum(run_ranks(3, shard_bytes)) == sum(tensor.numel() for tensor in parts.ema.state_dict().values())
