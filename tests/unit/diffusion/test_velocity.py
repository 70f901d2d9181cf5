"""v-prediction against diffusers' schedule and the family's training loss."""

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from ttv_train.diffusion.velocity import Velocity

BUCKET = (9, 32, 40)
SHAPE = (4, 3, 2, 4, 5)
TIMESTEPS = torch.tensor([0.0, 1.0, 500.0, 998.0])


def reference_scheduler(snr_shift_scale: float) -> CogVideoXDPMScheduler:
    """As the scheduler_config.json of the published checkpoints sets it."""
    return CogVideoXDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=snr_shift_scale,
        timestep_spacing="trailing",
    )


@pytest.fixture(params=[1.0, 3.0], ids=["5B", "2B"])
def pair(request):
    return Velocity(request.param, ("ddim",)), reference_scheduler(request.param)


def test_noise_and_target_are_those_of_diffusers(pair):
    objective, reference = pair
    latents, noise = torch.randn(SHAPE), torch.randn(SHAPE)
    noisy = objective.add_noise(latents, noise, TIMESTEPS)
    target = objective.target(latents, noise, TIMESTEPS)
    torch.testing.assert_close(noisy, reference.add_noise(latents, noise, TIMESTEPS.long()), atol=5e-6, rtol=0)
    torch.testing.assert_close(target, reference.get_velocity(latents, noise, TIMESTEPS.long()), atol=5e-6, rtol=0)


def test_loss_is_the_family_s_weighted_error_of_clean_latents(pair):
    """The published training recomputes x_0 from the predicted v and weighs its error by 1 / (1 - alpha_bar)."""
    objective, reference = pair
    latents, noise, prediction = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))
    noisy = reference.add_noise(latents, noise, TIMESTEPS.long())
    clean = reference.get_velocity(prediction, noisy, TIMESTEPS.long())
    weights = 1 / (1 - reference.alphas_cumprod[TIMESTEPS.long()])
    expected = weights * (clean - latents).square().flatten(1).mean(1)

    error = (prediction - objective.target(latents, noise, TIMESTEPS)).square().flatten(1).mean(1)
    torch.testing.assert_close(error * objective.loss_weight(TIMESTEPS), expected, rtol=1e-4, atol=0)


def test_the_last_step_is_noise_alone(pair):
    objective, _ = pair
    latents, noise, last = torch.randn(SHAPE), torch.randn(SHAPE), torch.full((4,), 999.0)
    assert torch.equal(objective.add_noise(latents, noise, last), noise)
    assert torch.equal(objective.target(latents, noise, last), -latents)


def test_timesteps_are_all_integers_equally_often():
    uniform = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    timesteps = Velocity(1.0, ()).timesteps(uniform, BUCKET)
    assert timesteps.dtype == torch.float32
    assert torch.equal(timesteps, torch.arange(1000.0).repeat_interleave(3))
    assert Velocity(1.0, ()).timesteps(torch.tensor([1 - 2**-24], dtype=torch.float32), BUCKET).item() == 999


def test_fractions_of_the_schedule():
    objective = Velocity(1.0, ())
    assert [objective.timestep_at(fraction) for fraction in (0.0, 0.1, 1.0)] == [0.0, 100.0, 999.0]
