import pytest

from ttv_train.config import SequenceParallelConfig
from ttv_train.errors import UserError
from ttv_train.parallel.sequence import build_sequence_parallel, check_heads
from ttv_train.parallel.sequence.none import NoSequenceParallel


def _config(**fields: object) -> SequenceParallelConfig:
    return SequenceParallelConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "num_heads"),
    [
        ({"scheme": "none"}, 1),
        ({"scheme": "ulysses", "degree": 4}, 4),
        ({"scheme": "ulysses", "degree": 4}, 30),
        ({"scheme": "ring", "degree": 8}, 1),
        ({"scheme": "usp", "degree": 8, "ulysses_degree": 2}, 3),
        ({"scheme": "dsp", "degree": 8}, 1),
    ],
)
def test_heads_that_suffice(fields, num_heads):
    check_heads(_config(**fields), num_heads)


@pytest.mark.parametrize(
    ("fields", "num_heads", "message"),
    [
        ({"scheme": "ulysses", "degree": 4}, 3, r"parallel\.sequence\.degree 4: .* the model has 3; lower it, or use"),
        (
            {"scheme": "usp", "degree": 8, "ulysses_degree": 4},
            2,
            r"parallel\.sequence\.ulysses_degree 4: .* the model has 2",
        ),
    ],
)
def test_too_few_heads_are_refused_by_name(fields, num_heads, message):
    with pytest.raises(UserError, match=message):
        check_heads(_config(**fields), num_heads)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "none", "degree": 2}, "degree 2 needs a scheme"),
        ({"scheme": "usp", "degree": 4}, "needs a ulysses_degree that divides degree 4, not None"),
        ({"scheme": "usp", "degree": 4, "ulysses_degree": 3}, "divides degree 4, not 3"),
        ({"scheme": "ring", "degree": 4, "ulysses_degree": 2}, "belongs to scheme usp, not ring"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        _config(**fields)


@pytest.mark.parametrize("scheme", ["none", "ulysses", "ring", "dsp"])
def test_one_rank_is_no_sequence_parallelism(scheme):
    assert isinstance(build_sequence_parallel(_config(scheme=scheme), None), NoSequenceParallel)
