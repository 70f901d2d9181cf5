import subprocess
import sys

import pytest
import torch

from ttv_train.parallel.rng import PAIRS_AT_A_TIME, fill_normal, keyed_normal, keyed_permutation, keyed_uniform


def test_a_draw_depends_on_its_key_alone():
    first = keyed_normal((2, 3), 0, "noise", "clip", 7)
    keyed_normal((5,), 1, "other")
    assert torch.equal(first, keyed_normal((2, 3), 0, "noise", "clip", 7))
    assert not torch.equal(first, keyed_normal((2, 3), 0, "noise", "clip", 8))


def test_parts_of_different_type_or_grouping_are_different_keys():
    draws = [keyed_uniform(1, "ab"), keyed_uniform("1", "ab"), keyed_uniform("1a", "b"), keyed_uniform("1ab")]
    assert len(set(draws)) == len(draws)


def test_draws_are_the_same_in_another_process():
    code = "from ttv_train.parallel.rng import keyed_uniform; print(repr(keyed_uniform(3, 'timestep', 'é', -1)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(printed) == keyed_uniform(3, "timestep", "é", -1)


def test_noise_is_standard_normal():
    noise = keyed_normal((100_000,), 0)
    assert noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


def filled(shape: tuple[int, ...], *key: str | int) -> torch.Tensor:
    out = torch.full(shape, torch.nan)
    fill_normal(out, *key)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_filled_noise_is_standard_normal_and_independent(seed):
    noise = filled((1_000_001,), seed).double()
    for power, moment in enumerate([0, 1, 0, 3, 0, 15], start=1):
        spread = (noise**power).std() / len(noise) ** 0.5
        assert abs((noise**power).mean() - moment) < 4.5 * spread, power
    assert 4.5 < noise.abs().max() < 7
    for lag in (1, 2, PAIRS_AT_A_TIME, 2 * PAIRS_AT_A_TIME):
        for power in (1, 2):
            first, second = (part - part.mean() for part in ((noise**power)[:-lag], (noise**power)[lag:]))
            assert abs((first * second).mean() / (first.std() * second.std())) < 4.5 / len(noise) ** 0.5, (lag, power)


def test_filled_noise_depends_on_its_key_alone():
    first = filled((2, 3, 5), 0, "noise", "clip", 7)
    assert torch.equal(first, filled((2, 3, 5), 0, "noise", "clip", 7))
    assert torch.equal(first.flatten(), filled((30,), 0, "noise", "clip", 7))
    assert not torch.equal(first, filled((2, 3, 5), 0, "noise", "clip", 8))
    assert filled((), 0).isfinite() and filled((0,), 0).shape == (0,)
    whole = torch.zeros(2, 4)
    fill_normal(whole[1], 3)
    assert whole[0].eq(0).all() and torch.equal(whole[1], filled((4,), 3))


def test_permutation():
    assert sorted(keyed_permutation(50, 0, "order")) == list(range(50))
