"""The contract of every registered family."""

import typing

import pytest
import torch

from tests.unit.models.tiny import TINY, build_tiny, predict_tiny
from ttv_train.config import ModelConfig, ObjectiveConfig, SamplingConfig, SequenceParallelConfig
from ttv_train.diffusion import build_objective
from ttv_train.models import FAMILIES
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.none import NoSequenceParallel


def choices(section, field: str) -> set[str]:
    """The values that a config field admits."""
    annotation = section.model_fields[field].annotation
    literals = [annotation, *typing.get_args(annotation)]
    return {
        value
        for literal in literals
        if typing.get_origin(literal) is typing.Literal
        for value in typing.get_args(literal)
    }


def test_the_config_offers_exactly_the_families():
    assert choices(ModelConfig, "family") == FAMILIES.keys() == TINY.keys()
    assert all(family.name == name for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_capabilities_are_values_of_the_config(name):
    family = FAMILIES[name]
    assert set(family.sequence_schemes) <= choices(SequenceParallelConfig, "scheme")
    assert "none" in family.sequence_schemes
    assert family.solvers.keys() <= choices(ObjectiveConfig, "kind")
    for kind, solvers in family.solvers.items():
        assert set(solvers) <= choices(SamplingConfig, "solver")
        objective = build_objective(ObjectiveConfig(kind=kind), family)
        for solver in solvers:
            scheduler = objective.scheduler(solver, 4, torch.device("cpu"), (9, 64, 64))
            assert len(scheduler.timesteps) == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_hold_most_parameters_once(name):
    family, model = FAMILIES[name], build_tiny(name)
    parameters = [parameter for block in family.blocks(model) for parameter in block.parameters()]
    assert len({id(parameter) for parameter in parameters}) == len(parameters)
    assert model.training
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_plan_fits_the_model(name):
    sequence = NoSequenceParallel()
    sequence.degree = 2
    parallelize_sequence(build_tiny(name), FAMILIES[name].sequence_plan, sequence)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_owns_its_share(name):
    family, grid = FAMILIES[name], (2, 3, 5)
    assert family.owned_tokens(NoSequenceParallel(), grid).all()
    assert family.owned_tokens(NoSequenceParallel(), grid).shape == grid


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_close_to_float32_with_timesteps_in_float32(name):
    """Timesteps that bfloat16 cannot tell apart give different predictions."""
    model = build_tiny(name)
    exact = predict_tiny(name, model, torch.tensor([500.0, 999.0]))
    model.to(torch.bfloat16)
    close = predict_tiny(name, model, torch.tensor([500.0, 999.0]), torch.bfloat16)
    assert exact.shape == close.shape
    assert float((close.float() - exact).detach().norm() / exact.detach().norm()) < 0.05
    other = predict_tiny(name, model, torch.tensor([501.0, 999.0]), torch.bfloat16)
    assert not torch.equal(close[0], other[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_batch_do_not_meet(name):
    model = build_tiny(name)
    both = predict_tiny(name, model, torch.tensor([500.0, 10.0]))
    torch.testing.assert_close(
        predict_tiny(name, model, torch.tensor([500.0, 900.0]))[0], both[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_new_weights_depend_on_the_seed_alone(name):
    first, second = build_tiny(name).state_dict(), build_tiny(name).state_dict()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
