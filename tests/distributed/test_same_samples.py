from types import SimpleNamespace

import pytest
import torch

from tests.harness import RankError, run_ranks
from ttv_train.config import parse_config
from ttv_train.parallel.mesh import build_mesh
from ttv_train.step import check_same_samples


def check(rank: int, world_size: int, degree: int, keys_by_rank: list[list[str]]) -> str:
    parallel = parse_config({"parallel": {"sequence": {"scheme": "ulysses", "degree": degree}}}).parallel
    check_same_samples([SimpleNamespace(keys=keys_by_rank[rank])], build_mesh(parallel, torch.device("cpu")))
    return "same"


def test_ranks_of_a_group_with_the_same_samples_go_on():
    assert run_ranks(2, check, 2, [["a", "b"]] * 2) == ["same"] * 2
    assert run_ranks(4, check, 2, [["a"], ["a"], ["b"], ["b"]]) == ["same"] * 4


@pytest.mark.parametrize("other", [["a", "c"], ["b", "a"], ["a"]])
def test_a_rank_with_another_sample_stops_the_group(other):
    with pytest.raises(RankError, match="read different samples"):
        run_ranks(2, check, 2, [["a", "b"], other])
