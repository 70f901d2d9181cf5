import subprocess
import sys

import torch

from ttv_train.parallel.rng import keyed_normal, keyed_permutation, keyed_uniform


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


def test_permutation():
    assert sorted(keyed_permutation(50, 0, "order")) == list(range(50))
