"""One tiny model of every family, and a batch for it."""

import torch
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.models import FAMILIES

TINY: dict[str, dict] = {
    "cogvideox": {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "time_embed_dim": 8,
        "num_layers": 2,
        "use_rotary_positional_embeddings": True,
    },
    "stdit3": {"hidden_size": 24, "depth": 1, "num_heads": 3, "input_sq_size": 32, "model_max_length": 5},
    "wan": {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 16, "freq_dim": 8},
    "hunyuan_video": {
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "rope_axes_dim": [4, 4, 4],
        "pooled_projection_dim": 6,
    },
    "ltx_video": {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 36},
}
LATENT_SHAPE = (4, 3, 6, 10)
TEXT_LENGTH, TEXT_WIDTH = 5, 7


def build_tiny(name: str) -> nn.Module:
    """The same random weights at every call."""
    torch.manual_seed(0)
    config = ModelConfig(family=name, config=TINY[name])
    return FAMILIES[name].build(config, latent_channels=LATENT_SHAPE[0], text_hidden_size=TEXT_WIDTH)


def predict_tiny(
    name: str, model: nn.Module, timesteps: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A prediction for the same two clips and ragged prompts at every call."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *LATENT_SHAPE, generator=generator, dtype=torch.float64)
    prompt_embeds = torch.randn(2, TEXT_LENGTH, TEXT_WIDTH, generator=generator, dtype=torch.float64)
    return FAMILIES[name].predict(
        model,
        latents.to(dtype),
        timesteps,
        prompt_embeds.to(dtype),
        torch.tensor([[True] * TEXT_LENGTH, [True] * 3 + [False] * (TEXT_LENGTH - 3)]),
        fps=torch.tensor([8.0, 24.0]),
        height=LATENT_SHAPE[2] * 8,
        width=LATENT_SHAPE[3] * 8,
    )
