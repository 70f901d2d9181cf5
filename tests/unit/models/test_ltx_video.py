"""LTX-Video against diffusers: attention and sampling; and what the adapter refuses."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline

from tests.unit.models.comparison import CHANNELS, assert_same_as_diffusers, build, prompts, sample_with_guidance
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES

FAMILY = FAMILIES["ltx_video"]
SMALL = {"num_attention_heads": 3, "attention_head_dim": 10, "num_layers": 2, "cross_attention_dim": 30}
BUCKET = (17, 192, 256)


def predict(model, latents, timesteps, prompt_embeds, prompt_mask, fps=25.0):
    rates = torch.full((len(latents),), fps)
    height, width = latents.shape[3] * 32, latents.shape[4] * 32
    return FAMILY.predict(model, latents, timesteps, prompt_embeds, prompt_mask, fps=rates, height=height, width=width)


@pytest.mark.parametrize("extra", [{}, {"norm_elementwise_affine": True, "attention_bias": False}])
def test_processor_equals_diffusers_in_output_and_every_gradient(extra):
    assert_same_as_diffusers(FAMILY, SMALL | extra, predict)


def test_sampling_equals_the_pipeline():
    model = build(FAMILY, SMALL).eval()
    noise = torch.randn(2, CHANNELS, 3, 6, 8, generator=torch.Generator().manual_seed(2))
    embeds, mask = prompts(2)
    negative = embeds.flip(0), mask.flip(0)
    # As the scheduler_config.json of the published checkpoints sets it.
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    pipeline = LTXPipeline(scheduler, None, None, None, model)
    pipeline.set_progress_bar_config(disable=True)
    packed = pipeline(
        prompt_embeds=embeds,
        prompt_attention_mask=mask,
        negative_prompt_embeds=negative[0],
        negative_prompt_attention_mask=negative[1],
        height=192,
        width=256,
        num_frames=17,
        frame_rate=25,
        num_inference_steps=5,
        guidance_scale=3.0,
        latents=pipeline._pack_latents(noise),
        output_type="latent",
    ).frames
    expected = pipeline._unpack_latents(packed, 3, 6, 8)
    result = sample_with_guidance(FAMILY, model, predict, noise, (embeds, mask), negative, 3.0, 5, BUCKET)
    assert result.abs().max() > 0.1
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


def test_each_clip_has_its_own_frame_rate():
    model = build(FAMILY, SMALL)
    latents, timesteps = torch.randn(2, CHANNELS, 3, 6, 8), torch.tensor([3.0, 870.0])
    embeds, mask = prompts(2)
    slow, fast = (predict(model, latents, timesteps, embeds, mask, fps=fps) for fps in (12.0, 24.0))
    assert not torch.allclose(slow, fast, atol=1e-4)
    mixed = FAMILY.predict(
        model, latents, timesteps, embeds, mask, fps=torch.tensor([12.0, 24.0]), height=192, width=256
    )
    torch.testing.assert_close(mixed, torch.stack([slow[0], fast[1]]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"patch_size": 2}, "must be 1"),
        ({"cross_attention_dim": 2048}, "cross_attention_dim 2048 must be .* 30"),
        ({"attention_head_dim": 7, "cross_attention_dim": 21}, "attention_head_dim 7 is odd"),
        ({"caption_channels": 5}, "caption_channels is 5, but the encoders give 12"),
    ],
)
def test_wrong_configs_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build(FAMILY, SMALL | config)


def test_every_latent_is_a_token():
    model = build(FAMILY, SMALL)
    assert FAMILY.token_grid(model, (CHANNELS, 3, 5, 7)) == (3, 5, 7)
    FAMILY.check_latents(model, (CHANNELS, 3, 5, 7))
    with pytest.raises(UserError, match="5 channels"):
        FAMILY.check_latents(model, (5, 3, 5, 7))
