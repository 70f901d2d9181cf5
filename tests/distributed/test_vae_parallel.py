"""One clip encoded by several ranks has the latents of one that encodes it whole."""

import pytest

from tests.distributed.vae_cases import LTX_0_9_5, VAES, WAN_2_2, compare
from tests.harness import run_ranks

TOLERANCE = 1e-5
MODES = [
    {"mode": "time"},
    {"mode": "time", "chunk_latent_frames": 1},
    {"mode": "space"},
]
# Latent frames (1, 5, 9, 13, 17 and 33 frames of VAEs that take four at a time) and rows: one frame, fewer frames than
# ranks, several frame batches, sizes that the ranks do not divide.
SIZES = [(1, 3), (2, 5), (3, 4), (4, 3), (5, 3), (9, 5)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", VAES)
def test_equals_the_plain_encoding(name, world_size):
    found = run_ranks(world_size, compare, list(range(world_size)), [name], {}, SIZES, MODES)
    assert len(found[0]) == len(SIZES) * len(MODES)
    for differences in found:
        assert max(differences.values()) < TOLERANCE, differences


def test_works_in_a_group_that_does_not_start_at_rank_0():
    found = run_ranks(4, compare, [2, 3], list(VAES), {}, [(5, 3)], MODES)
    assert [len(differences) for differences in found] == [0, 0, len(VAES) * len(MODES), len(VAES) * len(MODES)]
    assert max(value for differences in found for value in differences.values()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "settings"), [("AutoencoderKLWan", WAN_2_2), ("AutoencoderKLLTXVideo", LTX_0_9_5)], ids=["wan", "ltx"]
)
def test_knows_the_layers_of_later_versions(name, settings):
    found = run_ranks(3, compare, [0, 1, 2], [name], settings, [(1, 3), (5, 5)], MODES)
    assert max(value for differences in found for value in differences.values()) < TOLERANCE
