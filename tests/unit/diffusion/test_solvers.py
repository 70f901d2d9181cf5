"""Solvers with models whose answer is known. Equality with the families' pipelines is tested with the families."""

import pytest
import torch

from ttv_train.diffusion.flow_matching import FlowMatching, FlowSchedule
from ttv_train.diffusion.solvers import sample
from ttv_train.diffusion.velocity import Velocity
from ttv_train.errors import UserError

BUCKET = (9, 32, 32)
SHAPE = (2, 3, 2, 4, 4)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def perfect_model(objective, clean):
    """Predicts the target for the one clean video it knows, whatever noise it is shown."""

    def denoise(noisy, timesteps):
        if isinstance(objective, FlowMatching):
            return (noisy - clean) / (timesteps / 1000).view(-1, 1, 1, 1, 1)
        signal = objective.add_noise(torch.ones_like(noisy), torch.zeros_like(noisy), timesteps)
        deviation = objective.add_noise(torch.zeros_like(noisy), torch.ones_like(noisy), timesteps)
        return objective.target(clean, (noisy - signal * clean) / deviation, timesteps)

    return denoise


@pytest.mark.parametrize(
    ("objective", "solver"),
    [
        (FlowMatching(FlowSchedule(), ("euler",)), None),
        (FlowMatching(FlowSchedule(shift=lambda bucket: 7.0), ("euler",)), "euler"),
        (FlowMatching(FlowSchedule(shift=lambda bucket: 3.0), ("unipc",)), None),
        (FlowMatching(FlowSchedule(terminal=0.1), ("euler",)), None),
        (Velocity(1.0, ("ddim", "dpm")), None),
        (Velocity(3.0, ("ddim", "dpm")), "dpm"),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 2, 8])
def test_a_perfect_model_is_solved_exactly(objective, solver, num_steps):
    clean, noise = torch.randn(SHAPE), torch.randn(SHAPE)
    result = sample(
        perfect_model(objective, clean),
        objective,
        noise,
        num_steps,
        bucket=BUCKET,
        solver=solver,
        generators=generators(1, 2),
    )
    # UniPC gives the model whole timesteps, so that the model's answer is a little off.
    torch.testing.assert_close(result, clean, atol=1e-2 if objective.solvers == ("unipc",) else 1e-5, rtol=0)


def test_timesteps_are_float32_and_fall():
    seen = []

    def denoise(latents, timesteps):
        seen.append(timesteps)
        return torch.zeros_like(latents)

    sample(denoise, Velocity(1.0, ("ddim",)), torch.randn(SHAPE), 4, bucket=BUCKET)
    assert [t.tolist() for t in seen] == [[999.0] * 2, [749.0] * 2, [499.0] * 2, [249.0] * 2]
    assert all(t.dtype == torch.float32 for t in seen)


def test_drawn_noise_belongs_to_the_sample_not_to_the_batch():
    objective, noise = Velocity(1.0, ("dpm",)), torch.randn(SHAPE)

    def denoise(latents, timesteps):
        return latents * 0.3

    both = sample(denoise, objective, noise, 3, bucket=BUCKET, generators=generators(1, 2))
    second = sample(denoise, objective, noise[1:], 3, bucket=BUCKET, generators=generators(2))
    assert torch.equal(both[1:], second)
    with pytest.raises(ValueError, match="one generator per sample"):
        sample(denoise, objective, noise, 3, bucket=BUCKET)


def test_wrong_settings_are_named():
    objective = FlowMatching(FlowSchedule(), ("euler",))
    with pytest.raises(UserError, match=r"sampling\.solver ddim .* use euler"):
        sample(torch.mul, objective, torch.randn(SHAPE), 2, bucket=BUCKET, solver="ddim")
    with pytest.raises(UserError, match=r"sampling\.num_steps 1001"):
        sample(torch.mul, objective, torch.randn(SHAPE), 1001, bucket=BUCKET)
