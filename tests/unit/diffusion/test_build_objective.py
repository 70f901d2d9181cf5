"""Which objectives a family and a config admit."""

from types import SimpleNamespace

import pytest

from ttv_train.config import ObjectiveConfig
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.flow_matching import FlowMatching
from ttv_train.diffusion.velocity import Velocity
from ttv_train.errors import UserError

FAMILY = SimpleNamespace(
    name="both",
    solvers={"velocity": ("dpm", "ddim"), "flow_matching": ("euler",)},
    timestep_shift=lambda bucket: float(bucket[0]),
)


def test_objective_takes_its_settings_and_the_family_s_solvers():
    velocity = build_objective(ObjectiveConfig(kind="velocity", snr_shift_scale=3.0), FAMILY)
    assert isinstance(velocity, Velocity)
    assert velocity.solvers == ("dpm", "ddim")
    assert velocity.scheduler_config["snr_shift_scale"] == 3.0
    flow = build_objective(ObjectiveConfig(kind="flow_matching", timestep_shift=5.0), FAMILY)
    assert isinstance(flow, FlowMatching)
    assert flow.shift(None) == 5.0
    own = build_objective(ObjectiveConfig(kind="flow_matching"), FAMILY)
    assert isinstance(own, FlowMatching)
    assert own.shift((9, 48, 80)) == 9.0


@pytest.mark.parametrize(
    ("settings", "solvers", "message"),
    [
        ({"kind": "velocity"}, {"flow_matching": ("euler",)}, "objective.kind velocity does not fit model.family toy"),
        ({"kind": "velocity", "timestep_shift": 3.0}, FAMILY.solvers, "timestep_shift belong to flow_matching"),
        ({"kind": "velocity", "timestep_sampling": "logit_normal"}, FAMILY.solvers, "belong to flow_matching"),
        ({"kind": "flow_matching", "snr_shift_scale": 3.0}, FAMILY.solvers, "snr_shift_scale belongs to velocity"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, solvers, message):
    with pytest.raises(UserError, match=message):
        build_objective(ObjectiveConfig(**settings), SimpleNamespace(name="toy", solvers=solvers))
