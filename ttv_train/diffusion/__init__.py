"""Training objectives, chosen by `objective.kind`, and the solvers that sample what they train."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Protocol

from ttv_train.config import ObjectiveConfig
from ttv_train.diffusion.base import Objective
from ttv_train.diffusion.flow_matching import FlowMatching, FlowSchedule
from ttv_train.diffusion.velocity import Velocity
from ttv_train.errors import UserError


class ObjectiveCapabilities(Protocol):
    """What a model family says about objectives; see `ttv_train.models.base.ModelFamily`."""

    name: ClassVar[str]
    solvers: ClassVar[Mapping[str, tuple[str, ...]]]
    flow_schedule: ClassVar[FlowSchedule]


def build_objective(config: ObjectiveConfig, family: ObjectiveCapabilities) -> Objective:
    """The objective of `config` for models of `family`.

    Raises:
        UserError: the family cannot be trained with it, or a setting belongs to another objective.
    """
    if config.kind not in family.solvers:
        raise UserError(
            f"objective.kind {config.kind} does not fit model.family {family.name}; use {' or '.join(family.solvers)}"
        )
    solvers = family.solvers[config.kind]
    if config.kind == "velocity":
        if config.timestep_sampling is not None or config.timestep_shift is not None:
            raise UserError(
                "objective.timestep_sampling and objective.timestep_shift belong to flow_matching; velocity draws "
                "timesteps uniformly and is shifted by objective.snr_shift_scale"
            )
        if config.sigma_range != (0.0, 1.0):
            raise UserError("objective.sigma_range belongs to flow_matching; velocity trains every timestep")
        return Velocity(config.snr_shift_scale, solvers)
    if config.snr_shift_scale != 1.0:
        raise UserError(
            "objective.snr_shift_scale belongs to velocity; flow_matching is shifted by objective.timestep_shift"
        )
    schedule = replace(family.flow_schedule, sigma_range=config.sigma_range)
    if config.timestep_shift is not None:
        shift = config.timestep_shift
        schedule = replace(schedule, shift=lambda bucket: shift)
    if config.timestep_sampling is not None:
        schedule = replace(schedule, sampling=config.timestep_sampling)
    return FlowMatching(schedule, solvers)
