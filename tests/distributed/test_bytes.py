"""Bytes sent: the count of `collectives` against the formulas, and against what the kernel saw on the loopback."""

import json
import os
import subprocess
import sys
from math import prod

import pytest
import torch
import torch.distributed as dist

from tests.distributed.attention_cases import AttentionCase, make_inputs, run_attention
from tests.distributed.schemes import SCHEMES, build_scheme, scheme_settings
from tests.harness import run_ranks
from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.dsp import DynamicSequenceParallel
from ttv_train.parallel.sequence.shapes import split_sizes
from ttv_train.parallel.sequence.traffic import AttentionShape, attention_bytes, switch_bytes

EVEN = AttentionCase(tokens=24, heads=12, batch=2)
UNEVEN = AttentionCase(tokens=23, heads=10, key_heads=5, batch=2, text_lengths=(3, 3))


def _count_case(rank: int, world_size: int, scheme: str, case: AttentionCase, settings: dict) -> tuple[int, int]:
    """Calls and bytes of one attention, forward and backward."""
    sequence = build_scheme(scheme, **settings)
    collectives.reset()
    run_attention(sequence, make_inputs(case))
    counts = collectives.snapshot()
    counts.pop("check")
    return sum(count["calls"] for count in counts.values()), sum(count["bytes"] for count in counts.values())


def _sent(scheme: str, case: AttentionCase, world_size: int, **settings: object) -> list[int]:
    return [num_bytes for _, num_bytes in run_ranks(world_size, _count_case, scheme, case, settings)]


def _hidden_bytes(case: AttentionCase, tokens: int, heads: int) -> int:
    return case.batch * tokens * heads * case.channels * case.dtype.itemsize


def _formula(scheme: str, case: AttentionCase, world_size: int) -> list[int]:
    """What `traffic` says that each rank sends."""
    config = SequenceParallelConfig.model_validate(scheme_settings(scheme, world_size))
    text = max(case.text_lengths) if case.text_lengths else 0
    key_heads = case.key_heads or case.heads
    shape = AttentionShape(
        case.batch, case.tokens, case.heads, key_heads, case.channels, case.dtype.itemsize, text_tokens=text
    )
    return [attention_bytes(config, rank, shape).total for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_even_splits_send_what_the_papers_say(world_size):
    N, M = world_size, _hidden_bytes(EVEN, EVEN.tokens, EVEN.heads)
    assert _sent("ulysses", EVEN, N) == [8 * M * (N - 1) // N**2] * N
    assert _sent("ring", EVEN, N) == [6 * M * (N - 1) // N] * N
    assert _sent("ring-gather", EVEN, N) == [4 * M * (N - 1) // N] * N


def test_usp_sends_what_its_two_axes_send():
    U, R, M = 2, 2, _hidden_bytes(EVEN, EVEN.tokens, EVEN.heads)
    N = U * R
    assert _sent("usp", EVEN, N) == [8 * M // N * (U - 1) // U + 6 * M // N * (R - 1)] * N
    assert _sent("usp-gather", EVEN, N) == [8 * M // N * (U - 1) // U + 4 * M // N * (R - 1)] * N


def test_text_costs_ulysses_its_output_and_ring_nothing():
    case = AttentionCase(tokens=24, heads=12, text_lengths=(6, 6))
    N, M, M_t = 4, _hidden_bytes(case, 24, 12), _hidden_bytes(case, 6, 12)
    assert _sent("ulysses", case, N) == [8 * M * (N - 1) // N**2 + 2 * M_t * (N - 1) // N] * N
    assert _sent("ring", case, N) == [6 * M * (N - 1) // N] * N
    assert _sent("ring-gather", case, N) == [4 * M * (N - 1) // N] * N
    assert _sent("usp", case, N) == [8 * M // N // 2 + 6 * M // N + 2 * M_t // 2] * N


@pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_sends_exactly_what_the_formula_says(scheme, world_size, case):
    assert _sent(scheme, case, world_size) == _formula(scheme, case, world_size)


def test_ring_gradients_travel_in_float32_unless_told_otherwise():
    case = AttentionCase(tokens=12, heads=4, dtype=torch.bfloat16)
    N, M = 3, _hidden_bytes(case, 12, 4)
    assert _sent("ring", case, N) == [8 * M * (N - 1) // N] * N
    assert _sent("ring", case, N, ring_gradient_dtype="bfloat16") == [6 * M * (N - 1) // N] * N


def test_ulysses_makes_four_exchanges():
    assert [calls for calls, _ in run_ranks(2, _count_case, "ulysses", UNEVEN, {})] == [4, 4]


def _count_switches(rank: int, world_size: int, shape: tuple[int, ...]) -> int:
    """Bytes of one spatial and temporal pair, forward and backward."""
    sequence = DynamicSequenceParallel(dist.group.WORLD)
    x = sequence.shard(torch.zeros(shape, requires_grad=True), 1)
    collectives.reset()
    x = sequence.switch(x, 1, 2)
    sequence.switch(x, 2, 1, "space", "tokens").sum().backward()
    return int(collectives.snapshot()["dsp"]["bytes"])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_dsp_sends_half_of_ulysses_on_the_temporal_layer(world_size):
    shape = (2, 12, 24, 3)
    M, N = prod(shape) * 4, world_size
    assert run_ranks(N, _count_switches, shape) == [4 * M * (N - 1) // N**2] * N
    frames, locations = 5, 7
    of_frames, of_locations = split_sizes(frames, N), split_sizes(locations, N)
    expected = []
    for rank, (own_frames, own_locations) in enumerate(zip(of_frames, of_locations, strict=True)):
        there = own_frames * (locations - own_locations)
        back = own_locations * (frames - own_frames)
        expected.append(2 * (there + back) * 2 * 3 * 4)
        whole = (2, frames, locations, 3)
        switches = switch_bytes(N, rank, whole, 1, 2, 4) + switch_bytes(N, rank, whole, 2, 1, 4)
        assert switches.total == expected[-1]
    assert run_ranks(N, _count_switches, (2, frames, locations, 3)) == expected


def test_counts_equal_what_the_loopback_carried():
    """In a network namespace of its own, so that nothing else uses its loopback."""
    probe = subprocess.run(["unshare", "--net", "--map-root-user", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"needs a network namespace, which this machine does not allow: {probe.stderr.strip()}")
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-m", "tests.distributed.loopback_bytes"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    for name, (counted, carried) in json.loads(result.stdout).items():
        # Headers and acknowledgements add about a thousandth.
        assert counted <= carried <= 1.02 * counted, (name, counted, carried)
