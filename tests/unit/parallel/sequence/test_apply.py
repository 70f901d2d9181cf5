"""Hooks of a sequence plan, on a scheme that only writes down what it is asked."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.none import NoSequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan


class HalfSequence(NoSequenceParallel):
    """Keeps the first half of what it cuts, and doubles what it joins."""

    def __init__(self) -> None:
        super().__init__()
        self.degree = 2

    def shard(self, x, dim, name="tokens"):
        return x.narrow(dim, 0, x.shape[dim] // 2)

    def join(self, x, dim, name="tokens"):
        return torch.cat((x, x), dim)


class Inner(nn.Module):
    def forward(self, x, tables, *, extra=None, **rest):
        return x, tables, extra


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner, self.out, self.call = Inner(), nn.Identity(), call

    def forward(self, x):
        self.seen = self.call(self.inner, x)
        return self.out(self.seen[0])


PLAN = SequencePlan(shard={"inner": {"x": 1, "tables": 0, "extra": -1}}, join={"out": 1})
CALLS = {
    "positional": lambda inner, x: inner(x, (x[0], x[0]), extra=x),
    "keyword": lambda inner, x: inner(tables=(x[0], x[0]), x=x, extra=x),
    "with others": lambda inner, x: inner(x, tables=(x[0], x[0]), extra=x, unknown=3),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrap", [False, True])
def test_arguments_are_cut_however_they_are_passed(call, wrap):
    model = Outer(CALLS[call])
    if wrap:
        model.inner = checkpoint_wrapper(model.inner)
    parallelize_sequence(model, PLAN, HalfSequence())
    output = model(torch.ones(2, 4, 6, requires_grad=True))
    hidden, tables, extra = model.seen
    assert hidden.shape == (2, 2, 6)
    assert [table.shape for table in tables] == [(2, 6), (2, 6)]
    assert extra.shape == (2, 4, 3)
    assert output.shape == (2, 4, 6)


def test_none_and_omitted_arguments_are_left_alone():
    model = Outer(lambda inner, x: inner(x, None))
    parallelize_sequence(model, PLAN, HalfSequence())
    model(torch.ones(2, 4, 6))
    assert model.seen[1:] == (None, None)


def test_one_rank_needs_no_hooks():
    model = Outer(CALLS["keyword"])
    parallelize_sequence(model, PLAN, NoSequenceParallel())
    assert not model.inner._forward_pre_hooks
    assert not model.out._forward_hooks


def test_the_root_is_the_empty_path():
    class Root(nn.Module):
        def forward(self, x):
            return x

    model = Root()
    parallelize_sequence(model, SequencePlan(shard={"": {"x": 0}}), HalfSequence())
    assert model(torch.ones(4)).shape == (2,)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SequencePlan(shard={"missing": {"x": 1}}), "Outer has no module 'missing'"),
        (SequencePlan(join={"inner.missing": 1}), r"Outer has no module 'inner\.missing'"),
        (SequencePlan(shard={"inner": {"y": 1}}), "Inner at 'inner' has no argument 'y'; it has x, tables"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        parallelize_sequence(Outer(CALLS["keyword"]), plan, HalfSequence())


def test_what_is_no_tensor_is_refused():
    model = Outer(lambda inner, x: inner(3, x))
    parallelize_sequence(model, PLAN, HalfSequence())
    with pytest.raises(ValueError, match="cannot cut a int"):
        model(torch.ones(2, 4, 6))
    model = Outer(CALLS["keyword"])
    parallelize_sequence(model, SequencePlan(join={"inner": 1}), HalfSequence())
    with pytest.raises(ValueError, match="output of 'inner' is a tuple"):
        model(torch.ones(2, 4, 6))


class Tables(nn.Module):
    def forward(self, x):
        return x[0], (x[0] + 1, None)


class WithTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = Tables()

    def forward(self, x):
        return self.tables(x)


def test_outputs_are_cut_where_the_plan_says():
    model = WithTables()
    parallelize_sequence(model, SequencePlan(shard_output={"tables": 0}), HalfSequence())
    first, (second, nothing) = model(torch.arange(12.0).view(1, 4, 3))
    assert torch.equal(first, torch.arange(6.0).view(2, 3))
    assert torch.equal(second, first + 1)
    assert nothing is None
