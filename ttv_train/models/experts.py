"""Models that are two transformers, one for much noise and one for little, as Wan 2.2 14B is.

A run trains one of them (`objective.sigma_range`); sampling takes the other one for the other noise levels.
"""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from ttv_train.config import ModelConfig, RunConfig
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.build import parallelize_model
from ttv_train.parallel.agreement import world_rank
from ttv_train.parallel.mesh import ParallelMesh
from ttv_train.parallel.sequence.base import SequenceParallel

logger = logging.getLogger(__name__)

NUM_TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class OtherExpert:
    """The expert that this run does not train."""

    model: nn.Module
    sigma_range: tuple[float, float]
    """Noise levels of the one that it does."""
    guidance_scale: float

    def takes(self, timestep: float) -> bool:
        """Whether this one denoises at a timestep. The boundary itself belongs to the expert for much noise."""
        low, high = (sigma * NUM_TRAIN_TIMESTEPS for sigma in self.sigma_range)
        return timestep < low if low > 0 else timestep >= high


def build_other_expert(
    config: RunConfig,
    mesh: ParallelMesh,
    sequence: SequenceParallel,
    *,
    latent_channels: int,
    text_hidden_size: int,
    compute_dtype: torch.dtype,
) -> OtherExpert | None:
    """The transformer at `sampling.other_expert_path`, shared like the trained one; None where there is none.

    Its weights are kept in `compute_dtype`, since they are not trained.

    Raises:
        UserError: it cannot be loaded or does not fit the encoders, or `objective.sigma_range` leaves it nothing.
    """
    path, sigma_range = config.sampling.other_expert_path, config.objective.sigma_range
    if path is None:
        if sigma_range != (0.0, 1.0) and world_rank() == 0:
            logger.warning(
                "objective.sigma_range is %s and sampling.other_expert_path is not set: videos are sampled with a "
                "model that is not trained at the other noise levels",
                list(sigma_range),
            )
        return None
    if (sigma_range[0] == 0) == (sigma_range[1] == 1):
        raise UserError(
            f"sampling.other_expert_path {path}: objective.sigma_range {list(sigma_range)} leaves no single range of "
            "noise levels to another expert; set it to the trained one's, such as [0.875, 1] or [0, 0.875]"
        )
    family = FAMILIES[config.model.family]
    model = family.build(
        ModelConfig(family=config.model.family, path=path),
        latent_channels=latent_channels,
        text_hidden_size=text_hidden_size,
    )
    model.to(compute_dtype).eval().requires_grad_(False)
    parallelize_model(model, family, config.parallel, mesh, sequence, compute_dtype)
    scale = config.sampling.other_expert_guidance_scale
    return OtherExpert(model, sigma_range, config.sampling.guidance_scale if scale is None else scale)
