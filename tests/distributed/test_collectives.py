import torch
import torch.distributed as dist

from tests.harness import run_ranks
from ttv_train.parallel import collectives


def _use_every_collective(rank: int, world_size: int):
    collectives.reset()
    group = dist.group.WORLD
    # Rank i sends j + 1 elements of value 10 i + j to rank j, and nothing to rank 0.
    sizes = [0, 2, 3]
    sent = torch.cat([torch.full((size,), 10.0 * rank + peer) for peer, size in enumerate(sizes)])
    received = torch.empty(3 * sizes[rank])
    collectives.all_to_all(received, sent, [sizes[rank]] * 3, sizes, group, "exchange")

    around = torch.empty(rank)  # rank r receives r elements, so that rank 0 receives nothing
    following = (rank + 1) % 3
    transfer = collectives.start_transfer(
        [(torch.full((following,), float(rank)), following)], [(around, (rank - 1) % 3)], group, "ring"
    )
    transfer.wait()

    everyone = collectives.all_gather(torch.tensor([rank, -rank]), group, "check")
    rows = torch.full((sizes[rank], 2), float(rank))
    gathered = torch.empty(5, 2)
    collectives.all_gather_rows(gathered, rows, sizes, group, "join").wait()
    return received, around, everyone, gathered, collectives.snapshot()


def test_collectives_deliver_and_count_by_purpose():
    results = run_ranks(3, _use_every_collective)
    for rank, (received, around, everyone, gathered, counts) in enumerate(results):
        size = [0, 2, 3][rank]
        assert received.tolist() == [10.0 * peer + rank for peer in range(3) for _ in range(size)]
        assert around.tolist() == [float(rank - 1)] * rank
        assert everyone.tolist() == [[0, 0], [1, -1], [2, -2]]
        assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
        sent = {purpose: (count["calls"], count["bytes"]) for purpose, count in counts.items()}
        following = (rank + 1) % 3
        assert sent == {
            "exchange": (1, 4 * (5 - size)),
            "ring": (1 if following else 0, 4 * following),
            "check": (1, 2 * 16),
            "join": (2 if size else 0, 2 * 8 * size),
        }
        assert all(count["seconds"] >= 0 for count in counts.values())


def _two_groups(rank: int, world_size: int):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    got = torch.empty(1)
    peer = 1 - rank % 2
    collectives.start_transfer([(torch.tensor([float(rank)]), peer)], [(got, peer)], group, "ring").wait()
    return got.item()


def test_peers_are_ranks_of_the_group():
    assert run_ranks(4, _two_groups) == [1.0, 0.0, 3.0, 2.0]


def test_reset_forgets():
    collectives.reset()
    assert collectives.snapshot() == {}
