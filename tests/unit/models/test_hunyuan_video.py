"""HunyuanVideo against diffusers: attention and sampling; and what the adapter refuses."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline

from tests.unit.models.comparison import CHANNELS, assert_same_as_diffusers, build, prompts, sample_with_guidance
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES

FAMILY = FAMILIES["hunyuan_video"]
SMALL = {
    "num_attention_heads": 3,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "rope_axes_dim": [4, 4, 4],
    "pooled_projection_dim": 8,
}
BUCKET = (9, 48, 64)


def predict(model, latents, timesteps, prompt_embeds, prompt_mask, guidance=6.0):
    fps = torch.full((len(latents),), 24.0)
    return FAMILY.predict(
        model, latents, timesteps, prompt_embeds, prompt_mask, fps=fps, height=48, width=64, guidance=guidance
    )


@pytest.mark.parametrize("extra", [{}, {"guidance_embeds": False, "patch_size_t": 2}])
def test_processor_equals_diffusers_in_output_and_every_gradient(extra):
    assert_same_as_diffusers(FAMILY, SMALL | extra, predict)


@pytest.mark.parametrize("true_scale", [1.0, 3.0])
def test_sampling_equals_the_pipeline(true_scale):
    """With the guidance that is an input of the model, and with true guidance besides."""
    model = build(FAMILY, SMALL).eval()
    noise = torch.randn(2, CHANNELS, 3, 6, 8, generator=torch.Generator().manual_seed(2))
    embeds, mask = prompts(2)
    negative = embeds.flip(0), mask.flip(0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipeline = HunyuanVideoPipeline(None, None, model, None, scheduler, None, None)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt_embeds=embeds[:, 1:],
        pooled_prompt_embeds=embeds[:, 0, :8],
        prompt_attention_mask=mask[:, 1:],
        negative_prompt_embeds=negative[0][:, 1:],
        negative_pooled_prompt_embeds=negative[0][:, 0, :8],
        negative_prompt_attention_mask=negative[1][:, 1:],
        height=48,
        width=64,
        num_frames=9,
        num_inference_steps=5,
        guidance_scale=6.0,
        true_cfg_scale=true_scale,
        latents=noise,
        output_type="latent",
    ).frames
    result = sample_with_guidance(FAMILY, model, predict, noise, (embeds, mask), negative, true_scale, 5, BUCKET)
    assert result.abs().max() > 0.1
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


def test_guidance_is_an_input_where_the_model_has_it():
    latents, timesteps = torch.randn(2, CHANNELS, 3, 6, 8), torch.tensor([3.0, 870.0])
    for embeds_guidance in (True, False):
        model = build(FAMILY, SMALL | {"guidance_embeds": embeds_guidance})
        assert FAMILY.embeds_guidance(model) is embeds_guidance
        outs = [predict(model, latents, timesteps, *prompts(2), guidance=scale) for scale in (1.0, 6.0)]
        assert torch.equal(*outs) is not embeds_guidance


def test_an_empty_prompt_keeps_its_first_token():
    model = build(FAMILY, SMALL)
    embeds, mask = prompts(2)
    out = predict(model, torch.randn(2, CHANNELS, 3, 6, 8), torch.tensor([3.0, 870.0]), embeds, torch.zeros_like(mask))
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"image_condition_type": "token_replace"}, "image-to-video"),
        ({"in_channels": 9}, "in_channels is 9, but the encoders give 4; .*image to video is not supported"),
        ({"rope_axes_dim": [4, 4, 2]}, "must add up to attention_head_dim 12"),
        ({"pooled_projection_dim": 99}, "99 exceeds the text width 12"),
        ({"text_embed_dim": 5}, "text_embed_dim is 5, but the encoders give 12"),
    ],
)
def test_wrong_configs_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build(FAMILY, SMALL | config)


def test_latents_that_do_not_fit_are_named():
    model = build(FAMILY, SMALL | {"patch_size_t": 2})
    with pytest.raises(UserError, match="frames 3"):
        FAMILY.check_latents(model, (CHANNELS, 3, 6, 8))
    assert FAMILY.token_grid(model, (CHANNELS, 4, 6, 8)) == (2, 3, 4)


def test_blocks_are_those_of_both_kinds():
    model = build(FAMILY, SMALL)
    assert FAMILY.blocks(model) == [*model.transformer_blocks, *model.single_transformer_blocks]
