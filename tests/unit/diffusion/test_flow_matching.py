"""Rectified flow: paths, timestep densities and their shift."""

import pytest
import torch

from ttv_train.diffusion.flow_matching import FlowMatching, FlowSchedule

BUCKET = (9, 48, 80)
UNIFORM = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


def objective(shift=1.0, sampling="uniform") -> FlowMatching:
    return FlowMatching(FlowSchedule(shift=lambda bucket: shift, sampling=sampling), ("euler", "unipc"))


def timesteps(shift, sampling, uniform) -> torch.Tensor:
    return objective(shift, sampling).timesteps(uniform, BUCKET)


def test_path_is_straight_and_its_derivative_is_the_target():
    flow = objective()
    latents, noise = torch.randn(3, 2, 2, 3, 3), torch.randn(3, 2, 2, 3, 3)
    at = [flow.add_noise(latents, noise, torch.full((3,), t)) for t in (0.0, 250.0, 1000.0)]
    assert torch.equal(at[0], latents)
    assert torch.equal(at[2], noise)
    torch.testing.assert_close(at[1] + 0.75 * flow.target(latents, noise, torch.zeros(3)), noise)


def test_uniform_timesteps_reach_1000_but_never_zero():
    drawn = timesteps(1.0, "uniform", torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64))
    assert drawn.dtype == torch.float32
    assert drawn[:2].tolist() == [1000.0, 750.0]
    assert drawn[2] > 0


def test_logit_normal_timesteps_have_normal_logits():
    sigma = timesteps(1.0, "logit_normal", UNIFORM).double() / 1000
    logits = torch.logit(sigma)
    assert abs(logits.mean()) < 1e-5
    assert abs(logits.std() - 1) < 5e-3
    assert sigma.min() > 0


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_shift_acts_on_sigma(sampling):
    plain = timesteps(1.0, sampling, UNIFORM).double() / 1000
    shifted = timesteps(5.0, sampling, UNIFORM).double() / 1000
    torch.testing.assert_close(shifted, 5 * plain / (1 + 4 * plain), atol=1e-6, rtol=0)


def test_shift_may_depend_on_the_bucket():
    schedule = FlowSchedule(shift=lambda bucket: float(bucket[0]), sampling="uniform")
    assert torch.equal(FlowMatching(schedule, ()).timesteps(UNIFORM, BUCKET), timesteps(9.0, "uniform", UNIFORM))


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_a_range_keeps_the_density_of_the_whole(sampling):
    """The quantiles within the range are those of the draws that fall into it."""
    schedule = FlowSchedule(shift=lambda bucket: 3.0, sampling=sampling, sigma_range=(0.6, 0.9))
    flow = FlowMatching(schedule, ())
    drawn = flow.timesteps(UNIFORM, BUCKET)
    assert 600 < drawn.min() < drawn.max() < 900
    whole = timesteps(3.0, sampling, (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    inside = whole[(whole > 600) & (whole <= 900)].double()
    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(drawn.double().quantile(quantiles), inside.quantile(quantiles), atol=1.0, rtol=0)
    assert [flow.timestep_at(fraction) for fraction in (0.0, 0.5, 1.0)] == pytest.approx([600, 750, 900])


class TestScheduler:
    SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25])

    @pytest.mark.parametrize("solver", ["euler", "unipc"])
    def test_sampling_uses_the_same_shift(self, solver):
        scheduler = objective(3.0).scheduler(solver, 4, torch.device("cpu"), BUCKET)
        expected = 1000 * 3 * self.SIGMAS / (1 + 2 * self.SIGMAS)
        # UniPC gives the model whole timesteps.
        atol = 1.01 if solver == "unipc" else 1e-3
        torch.testing.assert_close(scheduler.timesteps.float(), expected, atol=atol, rtol=0)

    def test_sigmas_are_stretched_to_the_terminal(self):
        flow = FlowMatching(FlowSchedule(terminal=0.1), ("euler",))
        scheduler = flow.scheduler("euler", 4, torch.device("cpu"), BUCKET)
        expected = 1 - (1 - self.SIGMAS) * 0.9 / 0.75
        torch.testing.assert_close(scheduler.sigmas[:-1], expected)
        assert flow.scheduler("euler", 1, torch.device("cpu"), BUCKET).sigmas.tolist() == [1.0, 0.0]


def test_fractions_of_the_schedule():
    assert objective(3.0).timestep_at(0.3) == pytest.approx(300)
