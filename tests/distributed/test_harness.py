import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return os.getpid(), float(total)


def _fails_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("only here")
    dist.barrier()


def _hangs_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def _dies_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)


def test_ranks_share_a_group_and_processes_are_reused():
    first = run_ranks(3, _sum_of_ranks, 10)
    assert [total for _, total in first] == [33.0] * 3
    second = run_ranks(2, _sum_of_ranks, 0)
    assert [total for _, total in second] == [1.0] * 2
    assert [pid for pid, _ in second] == [pid for pid, _ in first[:2]]


def test_exception_of_a_rank_is_raised_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*_fails_on_rank_one.*KeyError: 'only here'"):
        run_ranks(2, _fails_on_rank_one)
    assert [total for _, total in run_ranks(2, _sum_of_ranks, 0)] == [1.0, 1.0]


def test_hang_is_an_error_that_shows_where():
    with pytest.raises(TimeoutError, match=r"(?s)rank 1 of 2 hangs.*_hangs_on_rank_one"):
        run_ranks(2, _hangs_on_rank_one, timeout=1)


def test_dead_rank_is_reported():
    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(2, _dies_on_rank_zero)
