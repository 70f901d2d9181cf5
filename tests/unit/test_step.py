import pytest
import torch

from ttv_train.config import OptimizerConfig
from ttv_train.step import latents_of_tokens, learning_rate


def test_owned_tokens_cover_their_patches():
    owned = torch.zeros(2, 2, 3, dtype=torch.bool)
    owned[1, 0, 2] = True
    mask = latents_of_tokens(owned, (2, 4, 6))
    expected = torch.zeros(2, 4, 6)
    expected[1, 0:2, 4:6] = 1
    assert torch.equal(mask, expected)


def test_patches_that_reach_beyond_the_latents_are_cut_off():
    owned = torch.ones(1, 4, 5, dtype=torch.bool)
    assert torch.equal(latents_of_tokens(owned, (1, 7, 9)), torch.ones(1, 7, 9))


def test_shares_of_all_ranks_add_up_to_one():
    owned = torch.arange(24).view(2, 3, 4) % 3
    total = sum(latents_of_tokens(owned == rank, (2, 6, 8)) for rank in range(3))
    assert torch.equal(total, torch.ones(2, 6, 8))


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (3, 1.0), (4, 1.0), (4 + 50, 0.55), (103, 0.1 + 0.9 * 0.000246719)],
)
def test_warmup_and_cosine(step, expected):
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4, final_learning_rate_ratio=0.1)
    assert learning_rate(config, step, total_steps=104) == pytest.approx(expected, rel=1e-5)


def test_constant():
    config = OptimizerConfig(learning_rate=3e-4, warmup_steps=0)
    assert learning_rate(config, 999, total_steps=1000) == 3e-4
