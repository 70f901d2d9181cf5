"""What every scheme shares: cutting, joining, records of lengths, and refusing ranks that disagree."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed.attention_cases import RAGGED, AttentionCase, make_inputs, run_attention, worst_difference
from tests.distributed.joint_model import PLAN, make_batch, make_model
from tests.distributed.schemes import SCHEMES, build_scheme
from tests.harness import RankError, run_ranks
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.dsp import DynamicSequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel


def _cut_and_join(rank: int, world_size: int, scheme: str, length: int):
    sequence = build_scheme(scheme)
    x = torch.arange(2.0 * length * 3, dtype=torch.float64).view(2, length, 3).requires_grad_()
    local = sequence.shard(x, 1)
    placed = sequence.join(local * 2, -2)
    placed.sum().backward()
    with sequence.gathering(), torch.no_grad():
        gathered = sequence.join(local, 1)
    assert sequence.join_mode == "place"
    return x.detach(), local.detach(), placed.detach(), gathered, x.grad, sequence.owned(length)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("scheme", ["ulysses", "causal-ring", "causal-usp"])
def test_cutting_placing_and_gathering(scheme, world_size, length):
    results = run_ranks(world_size, _cut_and_join, scheme, length)
    for x, local, placed, gathered, gradient, owned in results:
        torch.testing.assert_close(local, x[:, owned], rtol=0, atol=0)
        expected = torch.zeros_like(x)
        expected[:, owned] = 2 * x[:, owned]
        torch.testing.assert_close(placed, expected, rtol=0, atol=0)
        torch.testing.assert_close(gathered, x, rtol=0, atol=0)
        # Each rank has the gradient of its own tokens and of no others.
        assert (gradient[:, owned] == 2).all()
        assert gradient.sum() == 2 * 2 * 3 * len(owned)
    assert sorted(torch.cat([result[-1] for result in results]).tolist()) == list(range(length))


def _gather_with_gradient(rank: int, world_size: int) -> None:
    sequence = build_scheme("ulysses")
    local = sequence.shard(torch.ones(1, 4, requires_grad=True), 1)
    with sequence.gathering():
        sequence.join(local, 1)


def test_gathering_refuses_to_be_trained_through():
    with pytest.raises(RankError, match="join mode 'gather' has no gradient"):
        run_ranks(2, _gather_with_gradient)


def _sample(rank: int, world_size: int, scheme: str) -> torch.Tensor:
    sequence = build_scheme(scheme)
    model = make_model(sequence)
    parallelize_sequence(model, PLAN, sequence)
    batch = make_batch(7)
    batch.pop("target")
    with torch.no_grad(), sequence.gathering():
        return model(**batch)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sampling_has_the_whole_output_on_every_rank(scheme):
    batch = make_batch(7)
    batch.pop("target")
    with torch.no_grad():
        expected = make_model(NoSequenceParallel())(**batch)
    for output in run_ranks(4, _sample, scheme):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def _disagree(rank: int, world_size: int, scheme: str, fact: str) -> str:
    case = AttentionCase(text_lengths=(3,), batch=1)
    if rank == 1:
        case = {
            "length": replace(case, tokens=13),
            "batch": replace(case, batch=2, text_lengths=(3, 3)),
            "heads": replace(case, heads=5),
            "channels": replace(case, channels=4),
            "text": replace(case, text_lengths=(4,)),
            "no text": replace(case, text_lengths=None),
            "dtype": replace(case, dtype=torch.float32),
        }[fact]
    try:
        run_attention(build_scheme(scheme), make_inputs(case))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("scheme", "fact", "message"),
    [
        ("ulysses", "length", "length of 'tokens': [12, 13"),
        ("ring", "length", "length of 'tokens': [12, 13"),
        ("usp", "length", "length of 'tokens': [12, 13"),
        ("ulysses", "batch", "batch: [1, 2"),
        ("ulysses", "heads", "heads: [4, 5"),
        ("ulysses", "channels", "head channels: [8, 4"),
        ("ulysses", "text", "text tokens: [3, 4"),
        ("ulysses", "no text", "text tokens: [3, -1"),
        ("ulysses", "dtype", "dtype: [3, 2"),
    ],
)
def test_ranks_that_disagree_all_raise(scheme, fact, message):
    for error in run_ranks(4, _disagree, scheme, fact, timeout=20):
        assert f"disagree about {message}" in error


def _disagree_about_locations(rank: int, world_size: int) -> str:
    sequence = DynamicSequenceParallel(dist.group.WORLD)
    x = sequence.shard(torch.zeros(1, 4, 5 + rank, 2), 1)
    try:
        sequence.switch(x, 1, 2)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_disagree_about_what_to_switch_all_raise():
    assert all("size of dimension 2: [5, 6]" in error for error in run_ranks(2, _disagree_about_locations, timeout=20))


def _missing_rank(rank: int, world_size: int) -> None:
    sequence = build_scheme("ulysses")
    if rank == 1:
        return
    run_attention(sequence, make_inputs(AttentionCase()))


def test_a_rank_that_does_not_come_is_an_error_on_the_others():
    with pytest.raises(RankError, match="rank 0 of 2"):
        run_ranks(2, _missing_rank, timeout=20)


def _without_shard(rank: int, world_size: int) -> None:
    x = torch.zeros(1, 2, 3, 4)
    build_scheme("ulysses").attention(x, x, x)


def test_attention_before_shard_says_so():
    with pytest.raises(RankError, match="no sequence 'tokens' has been sharded"):
        run_ranks(2, _without_shard)


def test_a_mask_without_text_is_refused():
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="text_mask without text"):
        NoSequenceParallel().attention(x, x, x, text_mask=torch.ones(1, 2, dtype=torch.bool))


def _second_group(rank: int, world_size: int, scheme: str):
    """Two groups of two, each with a sequence of its own, as data-parallel replicas are."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    sequence = build_scheme(scheme, mesh.get_group("sequence"))
    return run_attention(sequence, make_inputs(RAGGED, seed=rank // 2))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_need_not_start_at_rank_zero(scheme):
    results = run_ranks(4, _second_group, scheme)
    for seed in (0, 1):
        differences = worst_difference(RAGGED, results[2 * seed : 2 * seed + 2], seed)
        assert max(differences.values()) < 1e-10, differences


def _low_precision(rank: int, world_size: int, scheme: str, dtype: torch.dtype):
    return run_attention(build_scheme(scheme), make_inputs(replace(RAGGED, tokens=33, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_low_precision_is_as_exact_as_in_one_process(scheme, dtype):
    case = replace(RAGGED, tokens=33, dtype=dtype)
    results = run_ranks(4, _low_precision, scheme, dtype)
    assert {x.dtype for result in results for x in result.values()} == {dtype}
    baseline = worst_difference(case, [run_attention(NoSequenceParallel(), make_inputs(case))])
    for name, difference in worst_difference(case, results).items():
        assert difference < 3 * baseline[name], (name, difference, baseline[name])
