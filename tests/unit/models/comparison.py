"""What the tests of every diffusers family share: tiny random models, and comparison with diffusers' own attention."""

from collections.abc import Callable

import torch
from torch import nn

from ttv_train.config import ModelConfig, ObjectiveConfig
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.solvers import sample
from ttv_train.models.base import ModelFamily
from ttv_train.parallel.sequence.none import NoSequenceParallel

CHANNELS, TEXT_WIDTH, TEXT_LENGTH = 4, 12, 5
Predict = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, latents, timesteps, prompt_embeds, prompt_mask) to a prediction."""


def build(family: ModelFamily, config: dict) -> nn.Module:
    """A model whose every parameter is random: zeros and ones of new models would hide mistakes."""
    torch.manual_seed(0)
    settings = ModelConfig(family=family.name, config=config)
    model = family.build(settings, latent_channels=CHANNELS, text_hidden_size=TEXT_WIDTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.1 if "norm" in name else 0.02) * torch.randn_like(parameter))
    return model


def prompts(batch: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and a ragged mask."""
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(batch, TEXT_LENGTH, TEXT_WIDTH, generator=generator, dtype=dtype)
    lengths = torch.arange(batch) % 3 + 3
    return embeds, torch.arange(TEXT_LENGTH) < lengths[:, None]


def assert_same_as_diffusers(family: ModelFamily, config: dict, predict: Predict, atol: float = 1e-6) -> None:
    """Output, and the gradient of every parameter and of the latents, relative to the largest of each tensor."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, CHANNELS, 2, 6, 8, generator=generator, dtype=torch.float64)
    results = []
    for ours in (False, True):
        model = build(family, config).double()
        if ours:
            family.install_attention(model, NoSequenceParallel())
        inputs = latents.clone().requires_grad_()
        out = predict(model, inputs, torch.tensor([3.0, 870.0]), *prompts(2, torch.float64))
        out.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"out": out, "latents": inputs.grad, **gradients})
    for name, expected in results[0].items():
        if expected is None:
            assert results[1][name] is None, name
            continue
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(results[1][name] / scale, expected / scale, atol=atol, rtol=0, msg=name)


def sample_with_guidance(
    family: ModelFamily,
    model: nn.Module,
    predict: Predict,
    noise: torch.Tensor,
    prompt: tuple[torch.Tensor, torch.Tensor],
    negative: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    num_steps: int,
    bucket: tuple[int, int, int],
    solver: str | None = None,
) -> torch.Tensor:
    """Our solver on the family's own schedule, with classifier-free guidance."""
    family.install_attention(model, NoSequenceParallel())

    def denoise(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        conditional = predict(model, latents, timesteps, *prompt)
        unconditional = predict(model, latents, timesteps, *negative)
        return unconditional + scale * (conditional - unconditional)

    objective = build_objective(ObjectiveConfig(kind="flow_matching"), family)
    return sample(denoise, objective, noise, num_steps, bucket=bucket, solver=solver)
