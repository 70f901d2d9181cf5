import pytest
import torch.distributed as dist

from tests.distributed.attention_cases import CASES, AttentionCase, make_inputs, run_attention, worst_difference
from tests.harness import run_ranks
from ttv_train.parallel.sequence.ring import RingSequenceParallel


def _run_cases(rank: int, world_size: int, cases: dict[str, AttentionCase], mode: str):
    sequence = RingSequenceParallel(dist.group.WORLD, mode)
    return {name: run_attention(sequence, make_inputs(case)) for name, case in cases.items()}


@pytest.mark.parametrize("mode", ["rotate", "gather"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_outputs_and_gradients_equal_one_process(world_size, mode):
    results = run_ranks(world_size, _run_cases, CASES, mode)
    for name, case in CASES.items():
        differences = worst_difference(case, [result[name] for result in results])
        assert max(differences.values()) < 1e-10, (name, differences)
