import pytest
import torch
import torch.distributed as dist

from ttv_train.verify.ranks import run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> int:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total) * 10 + rank


def test_ranks_form_a_group_and_answer_in_order():
    assert run_ranks(3, _sum_of_ranks, 1) == [60, 61, 62]


def _one_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has a bad day")


def test_what_a_rank_raises_is_raised_here():
    with pytest.raises(ValueError, match="rank 1 has a bad day"):
        run_ranks(2, _one_fails)
