"""Ranks agree about each step's batches before anybody computes."""

from types import SimpleNamespace

import pytest
import torch

from tests.harness import run_ranks
from tests.latent_samples import make_entry
from ttv_train.config_file import parse_config
from ttv_train.data.agreed import AgreedBatches, samples_differ
from ttv_train.errors import UserError
from ttv_train.parallel.mesh import build_mesh


def mesh_of(degree: int):
    sequence = {"scheme": "ulysses" if degree > 1 else "none", "degree": degree}
    return build_mesh(parse_config({"parallel": {"sequence": sequence}}).parallel, torch.device("cpu"))


def differ(rank: int, world_size: int, degree: int, keys_by_rank: list[list[str]]) -> bool:
    return samples_differ([SimpleNamespace(keys=keys_by_rank[rank])], mesh_of(degree))


@pytest.mark.parametrize(
    ("degree", "keys_by_rank", "expected"),
    [
        (2, [["a", "b"], ["a", "b"]], [False, False]),
        (2, [["a", "b"], ["a", "c"]], [True, True]),
        (2, [["a", "b"], ["b", "a"]], [True, True]),
        (2, [["a", "b"], ["a"]], [True, True]),
        (1, [["a"], ["b"]], [False, False]),
        (2, [["a"], ["a"], ["b"], ["b"]], [False] * 4),
        (2, [["a"], ["a"], ["b"], ["c"]], [False, False, True, True]),
    ],
)
def test_samples_are_compared_within_a_sequence_group(degree, keys_by_rank, expected):
    assert run_ranks(len(keys_by_rank), differ, degree, keys_by_rank) == expected


def step_of(rank: int, world_size: int, degree: int, outcomes: list, bad_keys: list[set[str]], fraction: float):
    """Each rank's next step; an outcome is a list of keys, or the message of an error."""
    entries = [make_entry(number) for number in range(4)]
    loader = SimpleNamespace(bad_keys=bad_keys[rank], entries=entries, store=SimpleNamespace(path="latents"))

    def steps():
        if isinstance(outcomes[rank], str):
            raise UserError(outcomes[rank])
        yield [SimpleNamespace(keys=outcomes[rank])]

    agreed = AgreedBatches(loader, steps(), mesh_of(degree), fraction)
    try:
        return agreed.next_step()[0].keys
    except UserError as error:
        return str(error)


def test_a_loader_that_fails_on_one_rank_fails_on_all():
    results = run_ranks(3, step_of, 1, [["a"], "the store is gone", ["c"]], [set()] * 3, 0.0)
    assert results == ["the store is gone"] * 3
    results = run_ranks(2, step_of, 2, ["the store is gone", ["a"]], [set()] * 2, 0.0)
    assert results == ["the store is gone"] * 2


def test_ranks_that_share_a_sequence_and_differ_stop_all_ranks():
    results = run_ranks(4, step_of, 2, [["a"], ["a"], ["b"], ["c"]], [set()] * 4, 0.0)
    assert all("read different samples" in result for result in results)


def test_bad_samples_are_counted_over_all_ranks_and_once_each():
    keys = [["a"], ["b"]]
    bad = [{"sample-0", "sample-1"}, {"sample-1", "sample-2"}]
    assert run_ranks(2, step_of, 1, keys, bad, 0.75) == keys
    results = run_ranks(2, step_of, 1, keys, bad, 0.5)
    assert all("3 of 4 samples are corrupt" in result and "shards/one.tar" in result for result in results)
