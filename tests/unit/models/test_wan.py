"""Wan against diffusers: attention and sampling; and what the adapter refuses."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

from tests.unit.models.comparison import CHANNELS, assert_same_as_diffusers, build, prompts, sample_with_guidance
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES

FAMILY = FAMILIES["wan"]
SMALL = {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16}


def predict(model, latents, timesteps, prompt_embeds, prompt_mask):
    fps = torch.full((len(latents),), 16.0)
    height, width = latents.shape[3] * 8, latents.shape[4] * 8
    return FAMILY.predict(model, latents, timesteps, prompt_embeds, prompt_mask, fps=fps, height=height, width=width)


@pytest.mark.parametrize("extra", [{}, {"cross_attn_norm": False, "patch_size": [2, 2, 2]}])
def test_processor_equals_diffusers_in_output_and_every_gradient(extra):
    assert_same_as_diffusers(FAMILY, SMALL | extra, predict)


def pipeline_latents(model, shift, noise, prompt, negative, expand_timesteps):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    pipeline = WanPipeline(None, None, None, scheduler, model, expand_timesteps=expand_timesteps)
    pipeline.set_progress_bar_config(disable=True)
    # The pipeline pads with zeros what lies beyond a prompt.
    return pipeline(
        prompt_embeds=prompt[0] * prompt[1][..., None],
        negative_prompt_embeds=negative[0] * negative[1][..., None],
        height=48,
        width=64,
        num_frames=9,
        num_inference_steps=6,
        guidance_scale=5.0,
        latents=noise,
        output_type="latent",
    ).frames


def inputs():
    noise = torch.randn(2, CHANNELS, 3, 6, 8, generator=torch.Generator().manual_seed(2))
    embeds, mask = prompts(2)
    return noise, (embeds, mask), (embeds.flip(0), mask.flip(0))


@pytest.mark.parametrize(
    ("height", "width", "shift", "expand_timesteps"),
    [(48, 64, 3.0, False), (720, 1280, 5.0, False), (704, 1280, 5.0, True)],
)
def test_sampling_equals_the_pipeline(height, width, shift, expand_timesteps):
    """Only the shift depends on the size in pixels. For 2.2 5B the pipeline gives each token a timestep, all equal."""
    assert FAMILY.flow_schedule.shift((9, height, width)) == shift
    model = build(FAMILY, SMALL).eval()
    noise, prompt, negative = inputs()
    expected = pipeline_latents(model, shift, noise, prompt, negative, expand_timesteps)
    result = sample_with_guidance(FAMILY, model, predict, noise, prompt, negative, 5.0, 6, (9, height, width))
    assert result.abs().max() > 0.1
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"in_channels": 36}, "in_channels is 36, but latents of this vae make it 4 for text to video or 12"),
        ({"attention_head_dim": 7}, "cannot be built: assert dim % 2 == 0"),
        ({"num_layer": 1}, "did you mean num_layers"),
    ],
)
def test_wrong_configs_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build(FAMILY, SMALL | config)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((5, 3, 6, 8), "5 channels"), ((4, 3, 7, 8), "height 7"), ((4, 3, 6, 9), "width 9"), ((4, 3, 6, 50), "positions")],
)
def test_latents_that_do_not_fit_are_named(shape, message):
    with pytest.raises(UserError, match=message):
        FAMILY.check_latents(build(FAMILY, SMALL | {"rope_max_seq_len": 24}), shape)


def test_adapter_describes_the_model():
    model = build(FAMILY, SMALL)
    assert FAMILY.token_grid(model, (CHANNELS, 3, 6, 8)) == (3, 3, 4)
    assert FAMILY.blocks(model) == list(model.blocks)
    assert FAMILY.num_attention_heads(model) == 3
