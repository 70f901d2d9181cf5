"""What is verified: transformers small enough for a CPU, the shapes they are given, and the schemes that share them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ttv_train.config import ModelConfig, ObjectiveConfig, RunConfig, SequenceParallelConfig, parse_bucket
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae import build_vae
from ttv_train.models import FAMILIES
from ttv_train.models.base import ModelFamily
from ttv_train.models.precision import keep_float64

LATENT_CHANNELS, TEXT_CHANNELS, TEXT_TOKENS = 4, 7, 5
HEADS = 5
"""Divisible by no degree from 2 to 4."""
FEW_TOKENS = (1, 2, 3, 5, 7)
"""Fewer tokens than ranks, and primes."""
PARAMETER_STD = 0.2
"""New weights are drawn anew: those that start at zero would hide what depends on them."""


@dataclass(frozen=True)
class ModelCase:
    """A transformer and the latents it is given, each in a batch of two with captions of different lengths."""

    name: str
    model: ModelConfig
    objective: ObjectiveConfig
    latent_shapes: tuple[tuple[int, int, int, int], ...]
    """``(C, t, h, w)`` each."""
    text_channels: int = TEXT_CHANNELS
    text_tokens: int = TEXT_TOKENS

    @property
    def latent_channels(self) -> int:
        return self.latent_shapes[0][0]

    @property
    def family(self) -> ModelFamily:
        return FAMILIES[self.model.family]

    @cached_property
    def num_attention_heads(self) -> int:
        return self.family.num_attention_heads(self.build(torch.float32))

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The transformer, with the same weights at every call. Raises UserError if that of a run cannot be built."""
        torch.manual_seed(0)
        model = self.family.build(self.model, latent_channels=self.latent_channels, text_hidden_size=self.text_channels)
        if self.model.path is None:
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=PARAMETER_STD)
        if dtype == torch.float64:
            for block in self.family.blocks(model):
                keep_float64(block)
            model.double()
        return model


@dataclass(frozen=True)
class SchemeCase:
    """A scheme of sequence parallelism, with one of its modes."""

    name: str
    config: SequenceParallelConfig = field(repr=False)


def family_cases(family: str) -> list[ModelCase]:
    """Tiny transformers of a family, with random weights: every variant that shares its sequence in its own way."""
    return [
        ModelCase(
            name,
            ModelConfig(family=family, config=settings),
            ObjectiveConfig(kind=next(iter(FAMILIES[family].solvers))),
            tuple((LATENT_CHANNELS, *grid) for grid in grids),
        )
        for name, settings, grids in _VARIANTS[family]
    ]


def config_case(config: RunConfig) -> ModelCase:
    """The transformer of a run, with latents of its buckets and captions of its text encoder's length.

    Raises:
        UserError: the VAE or the text encoder of `config` is not usable, or does not take a bucket.
    """
    cpu = torch.device("cpu")
    vae, text_encoder = build_vae(config.vae, cpu), build_text_encoder(config.text_encoder, cpu)
    shapes = [vae.latent_shape(*parse_bucket(bucket)) for bucket in config.dataset.buckets]
    return ModelCase(
        config.model.family,
        config.model,
        config.objective,
        tuple(shapes),
        text_encoder.hidden_size,
        text_encoder.max_length,
    )


def scheme_cases(schemes: Sequence[str], degree: int) -> list[SchemeCase]:
    """The schemes of that name over `degree` ranks, in each of their modes. With one rank there is but `none`."""
    if degree == 1:
        return [SchemeCase("none", SequenceParallelConfig())] if "none" in schemes else []
    cases = []
    variants: dict[str, dict[str, Any]]
    for scheme in schemes:
        settings: dict[str, Any] = {"scheme": scheme, "degree": degree}
        match scheme:
            case "none":
                continue
            case "ring":
                variants = {f"ring, {mode}": {"ring_mode": mode} for mode in ("rotate", "gather")}
            case "usp":
                variants = {
                    f"usp {ulysses}x{degree // ulysses}": {"ulysses_degree": ulysses, "ring_mode": "rotate"}
                    for ulysses in range(1, degree + 1)
                    if degree % ulysses == 0 and (degree in (2, 3) or 1 < ulysses < degree)
                }
            case _:
                variants = {scheme: {}}
        cases += [
            SchemeCase(name, SequenceParallelConfig.model_validate(settings | variant))
            for name, variant in variants.items()
        ]
    return cases


def _patched(patch_t: int, patch: int, *extra: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Latent grids of an even, an odd and a few tokens for patches of that size."""
    grids = [(2, 2, 6), (3, 3, 5), *((1, 1, tokens) for tokens in FEW_TOKENS), *extra]
    return [(patch_t * t, patch * h, patch * w) for t, h, w in grids]


_COGVIDEOX = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 16,
    "time_embed_dim": 8,
    "num_layers": 2,
    "max_text_seq_length": TEXT_TOKENS,
    "sample_width": 20,
    "sample_height": 20,
}
_ROTARY = {"use_rotary_positional_embeddings": True}
_VARIANTS: dict[str, list[tuple[str, dict[str, Any], list[tuple[int, int, int]]]]] = {
    "cogvideox": [
        ("cogvideox, rotary positions", _COGVIDEOX | _ROTARY, _patched(1, 2)),
        (
            "cogvideox, added positions",
            _COGVIDEOX
            | {
                "num_attention_heads": 12,
                "attention_head_dim": 4,
                "sample_height": 6,
                "sample_width": 10,
                "sample_frames": 9,
            },
            [(3, 6, 10)],
        ),
        ("cogvideox 1.5", _COGVIDEOX | _ROTARY | {"patch_size_t": 2, "patch_bias": False}, _patched(2, 2)),
    ],
    "stdit3": [
        (
            "stdit3",
            {
                "hidden_size": 8 * HEADS,
                "depth": 2,
                "num_heads": HEADS,
                "input_sq_size": 32,
                "model_max_length": TEXT_TOKENS,
            },
            _patched(1, 2, (5, 1, 1)),
        )
    ],
    "wan": [
        (
            "wan",
            {"num_attention_heads": HEADS, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 16, "freq_dim": 8},
            _patched(1, 2),
        )
    ],
    "hunyuan_video": [
        (
            "hunyuan_video",
            {
                "num_attention_heads": HEADS,
                "attention_head_dim": 12,
                "num_layers": 1,
                "num_single_layers": 1,
                "num_refiner_layers": 1,
                "rope_axes_dim": [4, 4, 4],
                "pooled_projection_dim": 6,
            },
            _patched(1, 2),
        )
    ],
    "ltx_video": [
        (
            "ltx_video",
            {
                "num_attention_heads": HEADS,
                "attention_head_dim": 12,
                "num_layers": 2,
                "cross_attention_dim": 12 * HEADS,
            },
            _patched(1, 1),
        )
    ],
}
