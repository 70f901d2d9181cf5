import torch
from hypothesis import given
from hypothesis import strategies as st

from ttv_train.parallel.sequence.causal import (
    balanced_runs,
    contiguous_runs,
    divide_runs,
    flatten_runs,
    num_tokens,
    unflatten_runs,
    visible_rectangles,
)


def _positions(runs):
    return [position for run in runs for position in range(run.start, run.stop)]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 3))
def test_runs_hold_every_token_once(length, degree, parts):
    for runs_of_ranks in (contiguous_runs(length, degree), balanced_runs(length, degree)):
        assert sorted(_positions([run for runs in runs_of_ranks for run in runs])) == list(range(length))
        assert unflatten_runs(*flatten_runs(runs_of_ranks)) == runs_of_ranks
        for runs in runs_of_ranks:
            divided = divide_runs(runs, parts)
            assert [position for part in divided for position in _positions(part)] == _positions(runs)
            sizes = [num_tokens(part) for part in divided]
            assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_rectangles_cover_what_is_seen_exactly_once(length, degree, block, balanced):
    runs = (balanced_runs if balanced else contiguous_runs)(length, degree)
    seen = torch.zeros(length, length, dtype=torch.int64)
    for query_runs in runs:
        for key_runs in runs:
            queries, keys = (torch.tensor(_positions(x), dtype=torch.int64) for x in (query_runs, key_runs))
            for part in visible_rectangles(query_runs, key_runs, block):
                inside = torch.ones(len(queries[part.query]), len(keys[part.key]), dtype=torch.int64)
                rows, columns = torch.meshgrid(queries[part.query], keys[part.key], indexing="ij")
                seen[rows, columns] += inside.tril() if part.diagonal else inside
    position = torch.arange(length)
    expected = position[None, :] // block <= position[:, None] // block
    assert torch.equal(seen, expected.long())


def test_balanced_runs_are_the_same_work_for_every_rank():
    length, degree = 4096, 4

    def work(runs_of_ranks):
        """Query-key pairs that each rank computes."""
        totals = []
        for query_runs in runs_of_ranks:
            pairs = 0
            for key_runs in runs_of_ranks:
                for part in visible_rectangles(query_runs, key_runs, 1):
                    area = (part.query.stop - part.query.start) * (part.key.stop - part.key.start)
                    pairs += area // 2 if part.diagonal else area
            totals.append(pairs)
        return totals

    assert len(set(work(balanced_runs(length, degree)))) == 1
    contiguous = work(contiguous_runs(length, degree))
    assert contiguous[-1] == 7 * contiguous[0]
