"""Rectified flow: paths, timestep densities and their shift."""

import pytest
import torch

from ttv_train.diffusion.flow_matching import FlowMatching

UNIFORM = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


def test_path_is_straight_and_its_derivative_is_the_target():
    objective = FlowMatching(1.0, "uniform", ())
    latents, noise = torch.randn(3, 2, 2, 3, 3), torch.randn(3, 2, 2, 3, 3)
    at = [objective.add_noise(latents, noise, torch.full((3,), t)) for t in (0.0, 250.0, 1000.0)]
    assert torch.equal(at[0], latents)
    assert torch.equal(at[2], noise)
    torch.testing.assert_close(at[1] + 0.75 * objective.target(latents, noise, torch.zeros(3)), noise)


def test_uniform_timesteps_reach_1000_but_never_zero():
    timesteps = FlowMatching(1.0, "uniform", ()).timesteps(torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64))
    assert timesteps.dtype == torch.float32
    assert timesteps[:2].tolist() == [1000.0, 750.0]
    assert timesteps[2] > 0


def test_logit_normal_timesteps_have_normal_logits():
    sigma = FlowMatching(1.0, "logit_normal", ()).timesteps(UNIFORM).double() / 1000
    logits = torch.logit(sigma)
    assert abs(logits.mean()) < 1e-5
    assert abs(logits.std() - 1) < 5e-3
    assert sigma.min() > 0


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_shift_acts_on_sigma(sampling):
    plain = FlowMatching(1.0, sampling, ()).timesteps(UNIFORM).double() / 1000
    shifted = FlowMatching(5.0, sampling, ()).timesteps(UNIFORM).double() / 1000
    torch.testing.assert_close(shifted, 5 * plain / (1 + 4 * plain), atol=1e-6, rtol=0)


def test_shift_may_depend_on_the_bucket():
    objective = FlowMatching(lambda bucket: float(bucket[0]), "uniform", ("euler",))
    fixed = FlowMatching(9.0, "uniform", ("euler",))
    bucket = (9, 48, 80)
    assert torch.equal(objective.timesteps(UNIFORM, bucket), fixed.timesteps(UNIFORM))
    with pytest.raises(ValueError, match="bucket"):
        objective.timesteps(UNIFORM)


def test_sampling_uses_the_same_shift():
    scheduler = FlowMatching(3.0, "uniform", ("euler",)).scheduler("euler", 4, torch.device("cpu"))
    sigma = torch.tensor([1.0, 0.75, 0.5, 0.25])
    torch.testing.assert_close(scheduler.timesteps, 1000 * 3 * sigma / (1 + 2 * sigma))


def test_fractions_of_the_schedule():
    objective = FlowMatching(3.0, "uniform", ())
    assert objective.timestep_at(0.3) == pytest.approx(300)
