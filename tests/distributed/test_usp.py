import pytest
import torch.distributed as dist

from tests.distributed.attention_cases import CASES, AttentionCase, make_inputs, run_attention, worst_difference
from tests.harness import run_ranks
from ttv_train.parallel.sequence.usp import UnifiedSequenceParallel


def _run_cases(rank: int, world_size: int, cases: dict[str, AttentionCase], ulysses_degree: int, mode: str):
    sequence = UnifiedSequenceParallel(dist.group.WORLD, ulysses_degree, mode)
    return {name: run_attention(sequence, make_inputs(case)) for name, case in cases.items()}


@pytest.mark.parametrize("mode", ["rotate", "gather"])
@pytest.mark.parametrize(("ulysses_degree", "ring_degree"), [(2, 2), (1, 3), (3, 1)])
def test_outputs_and_gradients_equal_one_process(ulysses_degree, ring_degree, mode):
    results = run_ranks(ulysses_degree * ring_degree, _run_cases, CASES, ulysses_degree, mode)
    for name, case in CASES.items():
        differences = worst_difference(case, [result[name] for result in results])
        assert max(differences.values()) < 1e-10, (name, differences)
