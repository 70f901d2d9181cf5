"""What the trainer needs to know about a model family, and nothing more.

An adapter describes a family: how its transformer is built, where its sequence is cut, what a forward pass takes. It
holds no weights and no state, so there is one object per family. Latents are `(B, C, t, h, w)` throughout the project;
an adapter permutes them when its transformer wants another order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.flow_matching import FlowSchedule
from ttv_train.errors import UserError
from ttv_train.models.diffusers_model import model_config
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan

LatentShape = tuple[int, ...]
"""Channels, frames, height and width of the latents of one clip, as `tuple(latents.shape[1:])` gives them."""


class ModelFamily(ABC):
    """Adapter of one family of video diffusion transformers."""

    name: ClassVar[str]
    """As in `model.family` of the config."""
    solvers: ClassVar[Mapping[str, tuple[str, ...]]]
    """Objectives that the family can be trained with -> solvers that can sample it, the family's own one first."""
    flow_schedule: ClassVar[FlowSchedule]
    """Timesteps of flow matching, where the family admits it."""
    uses_prompt_mask: ClassVar[bool]
    """Whether padded text tokens are masked. CogVideoX attends to padding, as it was trained."""
    joint_attention: ClassVar[bool]
    """Whether text tokens attend together with video tokens; otherwise they are attended to by cross attention."""
    sequence_schemes: ClassVar[tuple[str, ...]]
    """Schemes of sequence parallelism that the family's blocks can run under."""
    sequence_plan: ClassVar[SequencePlan]
    """Where the sequence of video tokens is cut and joined."""

    @abstractmethod
    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        """The transformer, float32 on the CPU: new from `config.config`, or with the weights at `config.path`.

        New weights are drawn from torch's global generator; the caller seeds it.

        Raises:
            UserError: unknown or impossible settings, weights that cannot be loaded, or a transformer that does not
                fit latents of `latent_channels` or text embeddings of `text_hidden_size`.
        """

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Transformer blocks in order: the units of parameter sharding and activation checkpointing."""

    def num_attention_heads(self, model: nn.Module) -> int:
        """Query heads of the self-attention."""
        return model_config(model).num_attention_heads

    @abstractmethod
    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        """Makes every self-attention of `model` call `sequence.attention`."""

    def embeds_guidance(self, model: nn.Module) -> bool:
        """Whether the guidance scale is an input of the model, so that sampling needs no pass without the prompt."""
        return False

    def takes_first_frame(self, model: nn.Module) -> bool:
        """Whether this is an image-to-video model, which is given the first frame of each clip."""
        return False

    def takes_image_embeds(self, model: nn.Module) -> bool:
        """Whether it is also given the frame as an image encoder sees it."""
        return False

    def null_prompt(self, model: nn.Module) -> torch.Tensor | None:
        """The embedding (L, D) that stands for no caption, where it comes with the model and not from the text encoder.
        A dropped caption keeps its mask."""
        return None

    def null_prompt_of_length(self, model: nn.Module, num_text_tokens: int) -> torch.Tensor | None:
        """`null_prompt` cut to the length of the captions, (num_text_tokens, D).

        Raises:
            UserError: captions are longer than it is.
        """
        embeds = self.null_prompt(model)
        if embeds is not None and len(embeds) < num_text_tokens:
            raise UserError(
                f"text_encoder.max_length {num_text_tokens} exceeds the {len(embeds)} tokens of the model's embedding "
                "of no caption; lower it, or raise model.config.model_max_length"
            )
        return None if embeds is None else embeds[:num_text_tokens]

    def num_padding_frames(self, model: nn.Module, num_latent_frames: int) -> int:
        """Latent frames that must be put in front of a clip, because the family patches several frames together.

        In training they are copies of the first latent frame; in sampling they are noise, and dropped at the end.
        """
        return 0

    @abstractmethod
    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        """Refuses latents that the model cannot take.

        Raises:
            UserError: naming the dimension that does not fit.
        """

    @abstractmethod
    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        """Video tokens along frames, height and width, in the order in which the sequence runs over them."""

    def owned_tokens(self, sequence: SequenceParallel, token_grid: tuple[int, int, int]) -> torch.Tensor:
        """Which video tokens this rank computes, bool of shape `token_grid`."""
        owned = torch.zeros(math.prod(token_grid), dtype=torch.bool)
        owned[sequence.owned(len(owned))] = True
        return owned.view(token_grid)

    @abstractmethod
    def predict(
        self,
        model: nn.Module,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        prompt_mask: torch.Tensor,
        *,
        fps: torch.Tensor,
        height: int,
        width: int,
        guidance: float = 1.0,
        first_frame: FirstFrame | None = None,
    ) -> torch.Tensor:
        """One forward pass.

        Args:
            noisy_latents: (B, C, t, h, w), in the type the model computes in.
            timesteps: (B,) float32, in [0, 1000].
            prompt_embeds: (B, L, D).
            prompt_mask: (B, L) bool, True where there is a token.
            fps: (B,) frames per second of the clips.
            height, width: of the clips, in pixels.
            guidance: scale for models that take it as an input; see `embeds_guidance`.
            first_frame: of each clip, normalized, for models that take it; see `takes_first_frame`.

        Returns:
            (B, C, t, h, w): the objective's target as the model predicts it, with values at the video tokens that this
            rank owns and zeros elsewhere when the sequence is shared.
        """


def check_channels(latent_shape: LatentShape, channels: int) -> None:
    """Refuses latents of another number of channels than the model takes.

    Raises:
        UserError: naming both.
    """
    if latent_shape[0] != channels:
        raise UserError(
            f"latents have {latent_shape[0]} channels, but the model takes in_channels {channels}; set vae to the one "
            "that the model was trained with, or model.config.in_channels to the latents'"
        )


def check_divisible(latent_shape: LatentShape, channels: int, patch_size: Sequence[int]) -> None:
    """`check_latents` of families whose only conditions are channels and whole patches.

    Raises:
        UserError: naming the dimension that does not fit.
    """
    check_channels(latent_shape, channels)
    for dimension, size, patch in zip(("frames", "height", "width"), latent_shape[1:], patch_size, strict=True):
        if size % patch:
            raise UserError(
                f"latents of {dimension} {size} are not a multiple of the model's patch of {patch}; change "
                "dataset.buckets"
            )
