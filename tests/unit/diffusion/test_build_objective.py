"""Which objectives a family and a config admit."""

from types import SimpleNamespace

import pytest

from ttv_train.config import ObjectiveConfig
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.flow_matching import FlowMatching, FlowSchedule
from ttv_train.diffusion.velocity import Velocity
from ttv_train.errors import UserError

FAMILY = SimpleNamespace(
    name="both",
    solvers={"velocity": ("dpm", "ddim"), "flow_matching": ("euler",)},
    flow_schedule=FlowSchedule(shift=lambda bucket: float(bucket[0]), terminal=0.1),
)


def test_objective_takes_its_settings_and_the_family_s_solvers():
    velocity = build_objective(ObjectiveConfig(kind="velocity", snr_shift_scale=3.0), FAMILY)
    assert isinstance(velocity, Velocity)
    assert velocity.solvers == ("dpm", "ddim")
    assert velocity.scheduler_config["snr_shift_scale"] == 3.0
    flow = build_objective(ObjectiveConfig(kind="flow_matching"), FAMILY)
    assert isinstance(flow, FlowMatching)
    assert flow.schedule == FAMILY.flow_schedule


def test_config_changes_the_family_s_schedule():
    config = ObjectiveConfig(
        kind="flow_matching", timestep_shift=5.0, timestep_sampling="uniform", sigma_range=(0.5, 1.0)
    )
    flow = build_objective(config, FAMILY)
    assert isinstance(flow, FlowMatching)
    assert flow.schedule.shift((9, 48, 80)) == 5.0
    assert (flow.schedule.sampling, flow.schedule.sigma_range, flow.schedule.terminal) == ("uniform", (0.5, 1.0), 0.1)


@pytest.mark.parametrize(
    ("settings", "solvers", "message"),
    [
        ({"kind": "velocity"}, {"flow_matching": ("euler",)}, "objective.kind velocity does not fit model.family toy"),
        ({"kind": "velocity", "timestep_shift": 3.0}, FAMILY.solvers, "timestep_shift belong to flow_matching"),
        ({"kind": "velocity", "timestep_sampling": "logit_normal"}, FAMILY.solvers, "belong to flow_matching"),
        ({"kind": "velocity", "sigma_range": (0.5, 1.0)}, FAMILY.solvers, "sigma_range belongs to flow_matching"),
        ({"kind": "flow_matching", "snr_shift_scale": 3.0}, FAMILY.solvers, "snr_shift_scale belongs to velocity"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, solvers, message):
    with pytest.raises(UserError, match=message):
        build_objective(
            ObjectiveConfig(**settings), SimpleNamespace(name="toy", solvers=solvers, flow_schedule=FlowSchedule())
        )
