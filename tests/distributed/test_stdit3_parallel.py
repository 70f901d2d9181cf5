"""STDiT3 under every scheme: ranks share the locations of each frame, and equal one process."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.distributed.schemes import SCHEMES, build_scheme
from tests.harness import run_ranks
from ttv_train.config import ModelConfig, SequenceParallelConfig
from ttv_train.models import FAMILIES
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence import build_sequence_parallel
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel

FAMILY = FAMILIES["stdit3"]
CONFIG = {"hidden_size": 24, "depth": 2, "num_heads": 3, "input_sq_size": 32, "model_max_length": 5}
# Frames, height and width of latents: uneven, padded to patches, fewer frames or locations than ranks.
SHAPES = {"uneven": (3, 5, 10), "one frame": (1, 6, 6), "one location": (5, 2, 2)}


def _build(sequence: SequenceParallel, **changes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(family="stdit3", config=CONFIG | changes)
    model = FAMILY.build(config, latent_channels=4, text_hidden_size=7).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    FAMILY.install_attention(model, sequence)
    parallelize_sequence(model, FAMILY.sequence_plan, sequence)
    return model


def _predict(model: torch.nn.Module, shape: tuple[int, int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return FAMILY.predict(
        model,
        torch.randn(2, 4, *shape, generator=generator, dtype=torch.float64),
        torch.tensor([17.0, 803.0]),
        torch.randn(2, 5, 7, generator=generator, dtype=torch.float64),
        torch.tensor([[True] * 5, [True, True, False, False, False]]),
        fps=torch.tensor([8.0, 24.0]),
        height=shape[1] * 8,
        width=shape[2] * 8,
    )


def _loss_and_gradients(sequence: SequenceParallel, shape: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    model = _build(sequence)
    prediction = _predict(model, shape)
    weights = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = (prediction * weights).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _sequence(scheme: str) -> SequenceParallel:
    if scheme == "dsp":
        config = SequenceParallelConfig(scheme="dsp", degree=dist.get_world_size())
        return build_sequence_parallel(config, dist.group.WORLD)
    return build_scheme(scheme)


def _run(rank: int, world_size: int, scheme: str) -> dict[str, dict[str, torch.Tensor]]:
    results = {name: _loss_and_gradients(_sequence(scheme), shape) for name, shape in SHAPES.items()}
    for result in results.values():
        for name in sorted(result):
            dist.all_reduce(result[name])
    return results


@pytest.mark.parametrize("scheme", [*SCHEMES, "dsp"])
def test_loss_and_gradients_equal_one_process(scheme):
    results = run_ranks(4 if scheme.startswith("usp") else 3, _run, scheme)[0]
    for case, result in results.items():
        expected = _loss_and_gradients(NoSequenceParallel(), SHAPES[case])
        assert math.isclose(result["loss"], expected["loss"], rel_tol=1e-10), case
        assert result.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = max(float(gradient.norm()), 1e-3)
            assert float((result[name] - gradient).norm()) / scale < 1e-10, (case, name)


def _predict_locally(rank: int, world_size: int, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    sequence = _sequence(scheme)
    owned = FAMILY.owned_tokens(sequence, (3, 3, 5))
    with torch.no_grad():
        return _predict(_build(sequence), (3, 6, 10)), owned


@pytest.mark.parametrize("scheme", ["ulysses", "dsp"])
def test_predictions_stand_at_the_owned_tokens(scheme):
    expected = _predict(_build(NoSequenceParallel()), (3, 6, 10))
    counts = torch.zeros(3, 3, 5)
    for prediction, owned in run_ranks(2, _predict_locally, scheme):
        latents = owned.repeat_interleave(2, 1).repeat_interleave(2, 2)
        torch.testing.assert_close(prediction[..., latents], expected[..., latents], rtol=1e-10, atol=1e-10)
        assert torch.all(prediction[..., ~latents] == 0)
        counts += owned
    assert torch.all(counts == 1)


def _bytes_by_purpose(rank: int, world_size: int, scheme: str) -> int:
    model = _build(_sequence(scheme), num_heads=2)
    collectives.reset()
    _predict(model, (4, 4, 8)).sum().backward()
    return sum(entry["bytes"] for purpose, entry in collectives.snapshot().items() if purpose == scheme)


@pytest.mark.parametrize(("scheme", "factor"), [("ulysses", 8), ("dsp", 4)])
def test_bytes_of_a_pair_of_blocks(scheme, factor):
    """Temporal blocks send nothing; spatial ones 8 M (N - 1) / N^2 under Ulysses and half of it under dsp."""
    hidden = 2 * 4 * 8 * CONFIG["hidden_size"] * 8
    for sent in run_ranks(2, _bytes_by_purpose, scheme):
        assert sent == CONFIG["depth"] * factor * hidden // 4
