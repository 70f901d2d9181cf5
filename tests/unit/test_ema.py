import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.training_parts import TinyModel
from ttv_train.ema import Ema


@given(st.floats(0, 0.9999), st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30))
def test_the_average_follows_its_recurrence(decay, weights):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema = Ema(model, decay)
    expected = 2.0
    for step, weight in enumerate(weights):
        with torch.no_grad():
            model.weight.fill_(weight)
        ema.update(step)
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * weight
    assert float(ema.state_dict()["weight"]) == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_the_warm_up_ends_at_the_decay():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema.update(0)
    assert float(ema.state_dict()["weight"]) == pytest.approx(0.9)  # decay 1 / 10
    ema.update(10**9)
    assert float(ema.state_dict()["weight"]) == pytest.approx(0.95)  # decay 0.5


def test_only_trainable_parameters_are_averaged():
    model = TinyModel()
    assert Ema(model, 0.9).state_dict().keys() == dict(model.named_parameters()).keys() - {"frozen"}


def test_applied_exchanges_the_weights_and_gives_them_back():
    model = TinyModel()
    ema = Ema(model, 0.9)
    averages = {name: average.clone() for name, average in ema.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    storage = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    with pytest.raises(KeyError), ema.applied(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, averages.get(name, weights[name]))
            assert parameter.data_ptr() == storage[name]
        raise KeyError
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    for name, average in ema.state_dict().items():
        assert torch.equal(average, averages[name])


@pytest.mark.parametrize("misuse", [lambda ema, model: ema.update(0), lambda ema, model: ema.state_dict()])
def test_the_average_is_out_of_reach_while_it_is_applied(misuse):
    model = TinyModel()
    ema = Ema(model, 0.9)
    with ema.applied(model), pytest.raises(AssertionError):
        misuse(ema, model)


def test_half_precision_weights_are_refused_by_name():
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16"):
        Ema(nn.Linear(2, 2, dtype=torch.bfloat16), 0.9)
