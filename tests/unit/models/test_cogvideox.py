"""CogVideoX against diffusers: attention, positions, sampling; and what the adapter refuses."""

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

from ttv_train.config import ModelConfig
from ttv_train.diffusion.solvers import sample
from ttv_train.diffusion.velocity import Velocity
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.cogvideox import rotary_table
from ttv_train.parallel.sequence.none import NoSequenceParallel

FAMILY = FAMILIES["cogvideox"]
CHANNELS, TEXT_WIDTH, TEXT_LENGTH = 4, 12, 5
SMALL = {
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 2,
    "time_embed_dim": 8,
    "max_text_seq_length": TEXT_LENGTH,
}
VERSIONS = {
    "2B": {},
    "5B": {"use_rotary_positional_embeddings": True},
    "1.5": {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False},
}


def build(**config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = FAMILY.build(ModelConfig(config={**SMALL, **config}), latent_channels=CHANNELS, text_hidden_size=TEXT_WIDTH)
    # New models of diffusers leave these at zero or one, which would hide mistakes.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def predict(model, latents, timesteps, prompt):
    return FAMILY.predict(
        model,
        latents,
        timesteps,
        prompt,
        torch.ones(prompt.shape[:2], dtype=torch.bool),
        fps=torch.full((len(latents),), 8.0),
        height=latents.shape[3] * 8,
        width=latents.shape[4] * 8,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_processor_equals_diffusers_in_output_and_every_gradient(version):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, CHANNELS, 4, 6, 8, generator=generator, dtype=torch.float64)
    prompt = torch.randn(2, TEXT_LENGTH, TEXT_WIDTH, generator=generator, dtype=torch.float64)
    results = []
    for ours in (False, True):
        model = build(**VERSIONS[version]).double()
        if ours:
            FAMILY.install_attention(model, NoSequenceParallel())
        inputs = latents.clone().requires_grad_()
        out = predict(model, inputs, torch.tensor([3.0, 870.0]), prompt)
        out.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"out": out, "latents": inputs.grad, **gradients})
    for name, expected in results[0].items():
        scale = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(results[1][name] / scale, expected / scale, atol=1e-6, rtol=0, msg=name)


class TestSampling:
    """The same weights, prompts, noise and steps as the family's pipeline."""

    LATENTS = (2, CHANNELS, 3, 6, 8)

    @staticmethod
    def pipeline_latents(model, scheduler, noise, prompt, negative, guidance, generator=None):
        pipeline = CogVideoXPipeline(None, None, None, model, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        frames = (TestSampling.LATENTS[2] - 1) * 4 + 1
        result = pipeline(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            height=noise.shape[3] * 8,
            width=noise.shape[4] * 8,
            num_frames=frames,
            num_inference_steps=5,
            guidance_scale=guidance,
            latents=noise.transpose(1, 2),
            output_type="latent",
            generator=generator,
        )
        return result.frames.transpose(1, 2)

    @pytest.mark.parametrize("guidance", [1.0, 6.0])
    @pytest.mark.parametrize(
        ("version", "scheduler_class", "snr_shift_scale"),
        [("2B", CogVideoXDDIMScheduler, 3.0), ("5B", CogVideoXDPMScheduler, 1.0), ("1.5", CogVideoXDPMScheduler, 1.0)],
    )
    def test_equals_the_pipeline(self, version, scheduler_class, snr_shift_scale, guidance):
        model = build(**VERSIONS[version]).eval()
        frames = self.LATENTS[2] + FAMILY.num_padding_frames(model, self.LATENTS[2])
        assert frames == (4 if version == "1.5" else 3)
        noise = torch.randn(self.LATENTS[0], CHANNELS, frames, *self.LATENTS[3:])
        prompt, negative = torch.randn(2, 2, TEXT_LENGTH, TEXT_WIDTH)
        scheduler = scheduler_class(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            clip_sample=False,
            snr_shift_scale=snr_shift_scale,
            timestep_spacing="trailing",
        )
        expected = self.pipeline_latents(
            model, scheduler, noise, prompt, negative, guidance, [torch.Generator().manual_seed(s) for s in (1, 2)]
        )

        FAMILY.install_attention(model, NoSequenceParallel())

        def denoise(latents, timesteps):
            conditional = predict(model, latents, timesteps, prompt)
            unconditional = predict(model, latents, timesteps, negative)
            return unconditional + guidance * (conditional - unconditional)

        result = sample(
            denoise,
            Velocity(snr_shift_scale, ("ddim", "dpm")),
            noise,
            5,
            bucket=(9, 48, 64),
            solver="ddim" if scheduler_class is CogVideoXDDIMScheduler else "dpm",
            generators=[torch.Generator().manual_seed(s) for s in (1, 2)],
        )
        assert result.abs().max() > 0.1
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("version", ["5B", "1.5"])
@pytest.mark.parametrize("grid", [(3, 4, 7), (2, 5, 5), (1, 30, 45)])
def test_rotary_table_is_the_pipeline_s(version, grid):
    model = build(**VERSIONS[version])
    pipeline = CogVideoXPipeline(None, None, None, model, CogVideoXDDIMScheduler())
    frames = grid[0] * (model.config.patch_size_t or 1)
    expected = pipeline._prepare_rotary_positional_embeddings(grid[1] * 16, grid[2] * 16, frames, torch.device("cpu"))
    for ours, theirs in zip(rotary_table(model.config, grid, torch.device("cpu")), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_token_grid_and_plan_agree_with_the_model():
    model = build(**VERSIONS["1.5"])
    assert FAMILY.token_grid(model, (CHANNELS, 4, 6, 10)) == (2, 3, 5)
    assert FAMILY.blocks(model) == list(model.transformer_blocks)
    for path in (*FAMILY.sequence_plan.shard, *FAMILY.sequence_plan.join):
        model.get_submodule(path)


def test_weights_are_loaded_from_a_folder(tmp_path):
    model = build(**VERSIONS["5B"])
    model.save_pretrained(tmp_path)
    loaded = FAMILY.build(ModelConfig(path=str(tmp_path)), latent_channels=CHANNELS, text_hidden_size=TEXT_WIDTH)
    assert isinstance(loaded, CogVideoXTransformer3DModel)
    assert loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(UserError, match="in_channels is 4, but the encoders give 8"):
        FAMILY.build(ModelConfig(path=str(tmp_path)), latent_channels=8, text_hidden_size=TEXT_WIDTH)


def test_folders_without_safe_or_whole_weights_are_refused(tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    with pytest.raises(UserError, match="safetensors"):
        FAMILY.build(ModelConfig(path=str(tmp_path / "pickle")), latent_channels=4, text_hidden_size=TEXT_WIDTH)
    del model.proj_out
    model.save_pretrained(tmp_path / "part")
    with pytest.raises(UserError, match=r"missing keys: proj_out"):
        FAMILY.build(ModelConfig(path=str(tmp_path / "part")), latent_channels=4, text_hidden_size=TEXT_WIDTH)
    with pytest.raises(UserError, match=r"model\.path .*nowhere"):
        FAMILY.build(ModelConfig(path=str(tmp_path / "nowhere")), latent_channels=4, text_hidden_size=TEXT_WIDTH)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layer": 2}, "unknown key num_layer; did you mean num_layers"),
        ({"zzz": 2}, "unknown key zzz; allowed: num_attention_heads"),
        ({"in_channels": 16}, "in_channels is 16, but the encoders give 4"),
        ({"text_embed_dim": 7}, "text_embed_dim is 7, but the encoders give 12"),
        ({"num_layers": "many"}, "cannot be built"),
        ({"use_rotary_positional_embeddings": True, "attention_head_dim": 24}, "multiple of 16"),
        ({"patch_size_t": 2}, "use_rotary_positional_embeddings: true"),
        ({"ofs_embed_dim": 8}, "image-to-video"),
    ],
)
def test_wrong_configs_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build(**config)


@pytest.mark.parametrize(
    ("version", "extra", "shape", "message"),
    [
        ("5B", {}, (8, 4, 6, 8), "8 channels"),
        ("5B", {}, (4, 4, 7, 8), "height 7 are not a multiple"),
        ("5B", {}, (4, 4, 6, 9), "width 9 are not a multiple"),
        ("1.5", {}, (4, 3, 6, 8), "3 frames"),
        ("1.5", {"sample_width": 6}, (4, 4, 6, 8), "width 8 exceed the model's sample_width 6"),
        (
            "5B",
            {"use_learned_positional_embeddings": True, "sample_height": 6, "sample_width": 10},
            (4, 4, 6, 8),
            "width 8 differ from sample_width 10",
        ),
    ],
)
def test_latents_that_do_not_fit_are_named(version, extra, shape, message):
    with pytest.raises(UserError, match=message):
        FAMILY.check_latents(build(**VERSIONS[version], **extra), shape)


def test_prompts_must_have_the_length_that_positions_were_made_for():
    model = build()
    with pytest.raises(UserError, match=r"text_encoder\.max_length 9 differs .* 5"):
        predict(model, torch.randn(1, CHANNELS, 3, 6, 8), torch.zeros(1), torch.randn(1, 9, TEXT_WIDTH))
