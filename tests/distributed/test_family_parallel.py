"""Every model family under every scheme that it declares: predictions and all gradients equal one process."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.distributed.schemes import SCHEMES, build_scheme
from tests.harness import run_ranks
from ttv_train.config import ModelConfig
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.models import FAMILIES
from ttv_train.models.precision import KeepFloat64
from ttv_train.parallel.sequence.apply import parallelize_sequence
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel

COGVIDEOX = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "time_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 5,
}
ROTARY = {"use_rotary_positional_embeddings": True}
MODELS: dict[str, tuple[str, dict, tuple[int, int, int, int]]] = {
    "cogvideox with rotary positions": ("cogvideox", COGVIDEOX | ROTARY, (4, 3, 6, 10)),
    "cogvideox with added positions": ("cogvideox", COGVIDEOX, (4, 3, 6, 10)),
    "cogvideox 1.5": ("cogvideox", COGVIDEOX | ROTARY | {"patch_size_t": 2, "patch_bias": False}, (4, 4, 6, 10)),
    "wan": (
        "wan",
        {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 16, "freq_dim": 8},
        (4, 3, 6, 10),
    ),
    "hunyuan_video": (
        "hunyuan_video",
        {
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "rope_axes_dim": [4, 4, 4],
            "pooled_projection_dim": 6,
        },
        (4, 3, 6, 10),
    ),
    "ltx_video": (
        "ltx_video",
        {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 36},
        (4, 2, 3, 4),
    ),
}
# One token: most ranks hold none.
MODELS |= {
    f"{name}, one token": (*MODELS[name][:2], (MODELS[name][2][0], 1, *grid))
    for name, grid in {
        "cogvideox with rotary positions": (2, 2),
        "wan": (2, 2),
        "hunyuan_video": (2, 2),
        "ltx_video": (1, 1),
    }.items()
}
FROM_FIRST_FRAME = {"in_channels": 2 * 4 + 4, "image_dim": 6, "added_kv_proj_dim": 36}
MODELS["wan from first frames"] = ("wan", MODELS["wan"][1] | FROM_FIRST_FRAME, (4, 3, 6, 10))
TEXT_CHANNELS = 7


def _loss_and_gradients(sequence: SequenceParallel, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    family_name, settings, latent_shape = MODELS[name]
    family = FAMILIES[family_name]
    torch.manual_seed(0)
    config = ModelConfig(family=family_name, config=settings)
    model = family.build(config, latent_channels=latent_shape[0], text_hidden_size=TEXT_CHANNELS).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    family.install_attention(model, sequence)
    parallelize_sequence(model, family.sequence_plan, sequence)
    latents, weights, frames = torch.randn(3, 2, *latent_shape, dtype=torch.float64)
    # Image-to-video Wan 2.1 counts on 512 text tokens.
    text_length = 512 if family.takes_image_embeds(model) else 5
    lengths = torch.tensor([text_length, 3])
    with KeepFloat64():
        prediction = family.predict(
            model,
            latents,
            torch.tensor([17.0, 803.0]),
            torch.randn(2, text_length, TEXT_CHANNELS, dtype=torch.float64),
            torch.arange(text_length) < lengths[:, None],
            fps=torch.tensor([8.0, 8.0]),
            height=48,
            width=80,
            first_frame=FirstFrame(frames, torch.randn(2, 5, 6, dtype=torch.float64)),
        )
    # Linear, so that the zeros at other ranks' tokens need no mask.
    loss = (prediction * weights).sum()
    loss.backward()
    gradients = {}
    for parameter_name, parameter in model.named_parameters():
        gradients[parameter_name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return loss.detach(), gradients


def _run(rank: int, world_size: int, scheme: str):
    results = {name: _loss_and_gradients(build_scheme(scheme), name) for name in MODELS}
    for loss, gradients in results.values():
        for tensor in (loss, *gradients.values()):
            dist.all_reduce(tensor)
    return results


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_and_gradients_equal_one_process(scheme):
    results = run_ranks(4 if scheme.startswith("usp") else 3, _run, scheme)[0]
    for name, (loss, gradients) in results.items():
        expected_loss, expected = _loss_and_gradients(NoSequenceParallel(), name)
        assert math.isclose(loss, expected_loss, rel_tol=1e-12), name
        for parameter, gradient in expected.items():
            # Some gradients are zero but for rounding: a softmax does not feel the bias of its keys.
            scale = max(float(gradient.norm()), 1e-3)
            assert float((gradients[parameter] - gradient).norm()) / scale < 1e-10, (name, parameter)
