import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttv_train.parallel.sequence.shapes import allocate_pieces, split_heads, split_sizes, split_slices


@given(st.integers(0, 200), st.integers(1, 16))
def test_runs_cover_everything_once_and_differ_by_at_most_one(length, parts):
    sizes = split_sizes(length, parts)
    assert len(sizes) == parts
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    covered = [position for part in split_slices(sizes) for position in range(length)[part]]
    assert covered == list(range(length))


def test_sizes_follow_torch_tensor_split():
    for length in range(12):
        expected = [len(piece) for piece in torch.arange(length).tensor_split(5)]
        assert split_sizes(length, 5) == expected


def test_slices_of_given_sizes():
    assert split_slices([2, 0, 3]) == [slice(0, 2), slice(2, 2), slice(2, 5)]


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_every_query_head_meets_its_own_key_head(num_key_heads, group, data):
    num_query_heads = num_key_heads * group
    parts = data.draw(st.integers(1, num_query_heads))
    split = split_heads(num_query_heads, num_key_heads, parts)
    dealt = [head for part in split.query for head in range(part.start, part.stop)]
    assert dealt == list(range(num_query_heads))
    for rank in range(parts):
        local = split.key_head_of(rank)
        assert [split.key[rank].start + head for head in local] == [
            head // group for head in range(split.query[rank].start, split.query[rank].stop)
        ]
        assert all(head < split.num_key(rank) for head in local)
        assert len(local) == split.num_query(rank)


@pytest.mark.parametrize(
    ("query", "key", "parts", "shares"),
    [(30, 30, 4, False), (12, 12, 7, False), (8, 4, 4, False), (8, 4, 3, False), (8, 2, 4, True), (6, 1, 2, True)],
)
def test_key_heads_are_sent_once_where_there_are_enough(query, key, parts, shares):
    split = split_heads(query, key, parts)
    assert split.shares_key_heads is shares
    if not shares:
        assert sum(split.num_key(rank) for rank in range(parts)) == key


def test_thirty_heads_on_four_ranks():
    split = split_heads(30, 30, 4)
    assert [split.num_query(rank) for rank in range(4)] == [8, 8, 7, 7]


def test_pieces_share_one_buffer():
    buffer, pieces = allocate_pieces(torch.zeros(1, dtype=torch.float64), [(2, 3), (0, 4), (1,)])
    assert buffer.shape == (7,)
    assert buffer.dtype == torch.float64
    assert [tuple(piece.shape) for piece in pieces] == [(2, 3), (0, 4), (1,)]
    buffer.copy_(torch.arange(7))
    assert pieces[0][1, 2] == 5
    assert pieces[2][0] == 6


def test_a_rank_without_heads_is_refused():
    with pytest.raises(ValueError, match="3 attention heads cannot be dealt to 4 ranks"):
        split_heads(3, 3, 4)
