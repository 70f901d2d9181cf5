import pytest
import torch
from diffusers import CogVideoXPipeline
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.schedulers import scheduling_dpm_cogvideox

from tests.unit.models.tiny import TINY as TINY_MODELS
from ttv_train.config import ModelConfig, ObjectiveConfig, SamplingConfig
from ttv_train.diffusion import build_objective
from ttv_train.errors import UserError
from ttv_train.generate import generate_latents, to_uint8
from ttv_train.models import FAMILIES
from ttv_train.parallel.rng import keyed_normal
from ttv_train.parallel.sequence.none import NoSequenceParallel

FAMILY = FAMILIES["cogvideox"]
BUCKET = (9, 48, 32)
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "time_embed_dim": 8,
    "sample_height": 6,
    "sample_width": 4,
    "sample_frames": 9,
    "max_text_seq_length": 5,
    "use_rotary_positional_embeddings": True,
}
LATENT_SHAPE = (4, 3, 6, 4)


def tiny_model(**settings):
    torch.manual_seed(0)
    model = FAMILY.build(ModelConfig(config=TINY | settings), latent_channels=4, text_hidden_size=8)
    FAMILY.install_attention(model, NoSequenceParallel())
    # The output layer starts near zero; a model that predicts something shows more.
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def prompts(count):
    embeds = keyed_normal((count + 1, 5, 8), "prompts")
    return embeds[:count], torch.ones(count, 5, dtype=torch.bool), (embeds[count], torch.ones(5, dtype=torch.bool))


def sample(model, keys, sampling, kind="velocity", family=FAMILY, null_offset=0.0):
    embeds, mask, (null_embeds, null_mask) = prompts(2)
    rows = [int(key[-1]) for key in keys]
    return generate_latents(
        model,
        family,
        build_objective(ObjectiveConfig(kind=kind), family),
        LATENT_SHAPE,
        embeds[rows],
        mask[rows],
        (null_embeds + null_offset, null_mask),
        bucket=BUCKET,
        fps=8.0,
        sampling=sampling,
        sample_keys=keys,
        sequence=NoSequenceParallel(),
    )


def count_batches(model):
    """The batch sizes of the forward passes to come."""
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize("guidance_scale", [1.0, 6.0])
@pytest.mark.parametrize("solver", ["ddim", "dpm"])
@pytest.mark.parametrize("settings", [{}, {"patch_size_t": 2, "patch_bias": False}], ids=["1.0", "1.5"])
def test_latents_equal_those_of_the_pipeline(guidance_scale, solver, settings, monkeypatch):
    # The solver that draws noise draws it in another order of dimensions; it is left out of both.
    monkeypatch.setattr(scheduling_dpm_cogvideox, "randn_tensor", lambda shape, **kwargs: torch.zeros(shape))
    model = tiny_model(**settings)
    sampling = SamplingConfig(num_steps=4, guidance_scale=guidance_scale, solver=solver, seed=3)
    ours = sample(model, ["key 0", "key 1"], sampling)

    padding = FAMILY.num_padding_frames(model, LATENT_SHAPE[1])
    assert padding == (1 if settings else 0)
    shape = (LATENT_SHAPE[0], LATENT_SHAPE[1] + padding, *LATENT_SHAPE[2:])
    noise = torch.stack([keyed_normal(shape, 3, "sampling noise", key) for key in ("key 0", "key 1")])
    scheduler = build_objective(ObjectiveConfig(), FAMILY).scheduler(solver, 4, torch.device("cpu"), BUCKET)
    # diffusers' own attention, with the same weights.
    model.set_attn_processor(CogVideoXAttnProcessor2_0())
    pipeline = CogVideoXPipeline(None, None, None, model, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    embeds, _, null_prompt = prompts(2)
    theirs = pipeline(
        height=BUCKET[1],
        width=BUCKET[2],
        num_frames=BUCKET[0],
        num_inference_steps=4,
        guidance_scale=guidance_scale,
        prompt_embeds=embeds,
        negative_prompt_embeds=null_prompt[0].expand_as(embeds),
        latents=noise.permute(0, 2, 1, 3, 4),
        output_type="latent",
    ).frames
    torch.testing.assert_close(ours, theirs.permute(0, 2, 1, 3, 4)[:, :, padding:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "solver"), [("velocity", "ddim"), ("velocity", "dpm"), ("flow_matching", "euler")])
def test_a_video_depends_on_its_key_and_seed_alone(kind, solver):
    model = tiny_model()
    sampling = SamplingConfig(num_steps=2, guidance_scale=2.0, solver=solver)
    both = sample(model, ["key 0", "key 1"], sampling, kind)
    assert both.shape == (2, *LATENT_SHAPE)
    torch.testing.assert_close(sample(model, ["key 1"], sampling, kind)[0], both[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(both[0], both[1])
    other_seed = sampling.model_copy(update={"seed": 1})
    assert not torch.allclose(sample(model, ["key 1"], other_seed, kind)[0], both[1])


def test_guidance_uses_the_empty_prompt_and_scale_one_does_not():
    model = tiny_model()
    calls = count_batches(model)
    plain, guided = (
        sample(model, ["key 0"], SamplingConfig(num_steps=2, guidance_scale=scale)) for scale in (1.0, 3.0)
    )
    assert calls == [1, 1, 2, 2]
    assert not torch.allclose(plain, guided)
    for scale, changes in ((1.0, False), (3.0, True)):
        sampling = SamplingConfig(num_steps=2, guidance_scale=scale)
        other = sample(model, ["key 0"], sampling, null_offset=1.0)
        assert torch.allclose(other, guided if changes else plain) is not changes


def test_an_empty_prompt_that_comes_with_the_model_is_used():
    torch.manual_seed(0)
    family = FAMILIES["stdit3"]
    model = family.build(
        ModelConfig(family="stdit3", config=TINY_MODELS["stdit3"]), latent_channels=4, text_hidden_size=8
    )
    family.install_attention(model, NoSequenceParallel())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    sampling = SamplingConfig(num_steps=2, guidance_scale=4.0)
    latents = sample(model, ["key 0"], sampling, "flow_matching", family)
    assert torch.equal(sample(model, ["key 0"], sampling, "flow_matching", family, null_offset=1.0), latents)
    model.y_embedder.y_embedding += 1
    assert not torch.allclose(sample(model, ["key 0"], sampling, "flow_matching", family), latents)


def test_a_model_that_takes_the_guidance_scale_needs_one_pass():
    torch.manual_seed(0)
    family = FAMILIES["hunyuan_video"]
    settings = TINY_MODELS["hunyuan_video"] | {"guidance_embeds": True}
    model = family.build(ModelConfig(family="hunyuan_video", config=settings), latent_channels=4, text_hidden_size=8)
    family.install_attention(model, NoSequenceParallel())
    calls = count_batches(model)
    weak, strong = (
        sample(model, ["key 0"], SamplingConfig(num_steps=2, guidance_scale=scale), "flow_matching", family)
        for scale in (2.0, 9.0)
    )
    assert calls == [1, 1, 1, 1]
    assert not torch.allclose(weak, strong)


def test_the_model_is_left_in_its_mode():
    model = tiny_model().train()
    sample(model, ["key 0"], SamplingConfig(num_steps=1))
    assert model.training


def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match=r"sampling\.solver euler"):
        sample(tiny_model(), ["key 0"], SamplingConfig(num_steps=1, solver="euler"))
    with pytest.raises(UserError, match="width 4"):
        sample(tiny_model(patch_size=3, sample_width=6), ["key 0"], SamplingConfig(num_steps=1))


def test_levels_are_rounded_and_clamped():
    video = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 7.0]).view(1, 1, 6, 1, 1).expand(1, 3, 6, 1, 2)
    levels = to_uint8(video)
    assert levels.shape == (1, 6, 1, 2, 3)
    assert levels.dtype == torch.uint8
    assert levels[0, :, 0, 0, 0].tolist() == [0, 0, 128, 255, 255, 255]
