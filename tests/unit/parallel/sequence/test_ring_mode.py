import pytest

from ttv_train.parallel.sequence.ring import gathers


@pytest.mark.parametrize(
    ("block_sizes", "heads", "key_heads", "expected"),
    [
        ([4096, 4096], 12, 12, False),
        ([1024, 1023], 12, 12, True),
        ([8192] * 4, 12, 3, True),
        ([8192] * 4, 12, 4, False),
    ],
)
def test_auto_gathers_short_sequences_and_few_key_heads(block_sizes, heads, key_heads, expected):
    assert gathers("auto", block_sizes, heads, key_heads) is expected


@pytest.mark.parametrize(("mode", "expected"), [("rotate", False), ("gather", True)])
def test_a_mode_that_is_given_is_used(mode, expected):
    assert gathers(mode, [10, 10], 4, 4) is expected
