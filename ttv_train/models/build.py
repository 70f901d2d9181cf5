"""From a config to a model that is ready to run on this mesh: built, sequence-parallel, sharded."""

import logging

import torch
from torch import nn

from ttv_train.config import ParallelConfig, RunConfig, TransformersTextEncoderConfig
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.base import ModelFamily
from ttv_train.parallel.agreement import world_rank
from ttv_train.parallel.fsdp import shard_model
from ttv_train.parallel.mesh import ParallelMesh
from ttv_train.parallel.sequence import build_sequence_parallel, check_heads
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.base import SequenceParallel

logger = logging.getLogger(__name__)


def build_model(
    config: RunConfig, mesh: ParallelMesh, *, latent_channels: int, text_hidden_size: int, compute_dtype: torch.dtype
) -> tuple[nn.Module, SequenceParallel]:
    """Builds the model of `config` with the same weights on every rank, then cuts its sequence and its parameters.

    Raises:
        UserError: the model cannot be built, does not fit the encoders, or cannot be split as the config says.
    """
    family = FAMILIES[config.model.family]
    scheme = config.parallel.sequence.scheme
    if scheme not in family.sequence_schemes:
        raise UserError(
            f"parallel.sequence.scheme {scheme} does not fit model.family {family.name}; use "
            f"{' or '.join(family.sequence_schemes)}"
        )
    recipe = getattr(config.text_encoder, "recipe", None)
    if recipe not in (None, family.name):
        raise UserError(
            f"text_encoder.recipe {recipe} is not that of model.family {family.name}; set it to {family.name}, and "
            "run `ttv-train encode` again"
        )
    pretrained_text = isinstance(config.text_encoder, TransformersTextEncoderConfig)
    if config.model.path is not None and pretrained_text and recipe is None and world_rank() == 0:
        logger.warning(
            "text_encoder.recipe is not set: the weights at model.path may not know how captions are embedded without "
            "it; set it to %s unless they were trained so",
            family.name,
        )
    torch.manual_seed(config.seed)
    model = family.build(config.model, latent_channels=latent_channels, text_hidden_size=text_hidden_size)
    if family.takes_first_frame(model) and not config.first_frame.enabled:
        raise UserError(
            "model: it is an image-to-video model, but first_frame.enabled is false; set it to true and run `ttv-train "
            "encode` again"
        )
    if family.takes_image_embeds(model) and config.first_frame.image_encoder_path is None:
        raise UserError(
            "model: it takes image embeddings, but first_frame.image_encoder_path is not set; set it to the model's "
            "pipeline and run `ttv-train encode` again"
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise UserError(
            "model: dropout draws random numbers that no key decides, so the loss would depend on the number of ranks; "
            "set it to 0 in model.config, or in the config.json of model.path"
        )
    check_heads(config.parallel.sequence, family.num_attention_heads(model))
    sequence = build_sequence_parallel(config.parallel.sequence, mesh.sequence_group)
    parallelize_model(model, family, config.parallel, mesh, sequence, compute_dtype)
    return model, sequence


def parallelize_model(
    model: nn.Module,
    family: ModelFamily,
    config: ParallelConfig,
    mesh: ParallelMesh,
    sequence: SequenceParallel,
    compute_dtype: torch.dtype,
) -> None:
    """Makes a plain `model`, the same on every rank, one that `mesh` shares: its sequence, then its parameters."""
    family.install_attention(model, sequence)
    parallelize_sequence(model, family.sequence_plan, sequence)
    # Sharding moves the model to the device, block by block: the device never holds all of it.
    shard_model(model, family.blocks(model), config, mesh, sequence, compute_dtype)
