"""Wan 2.2 14B is two transformers: sampled by one process or by two, they give what diffusers' pipeline gives."""

import logging

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from tests.harness import run_ranks
from tests.unit.models.comparison import CHANNELS, TEXT_LENGTH, TEXT_WIDTH, build, prompts
from ttv_train.config_file import parse_config
from ttv_train.diffusion import build_objective
from ttv_train.errors import UserError
from ttv_train.generate import generate_latents
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.models.experts import OtherExpert, build_other_expert
from ttv_train.parallel.mesh import build_mesh
from ttv_train.parallel.rng import keyed_normal

FAMILY = FAMILIES["wan"]
SMALL = {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16}
BUCKET, LATENT_SHAPE = (9, 48, 64), (CHANNELS, 3, 6, 8)
BOUNDARY = 0.875
RANGES = {"high": [BOUNDARY, 1.0], "low": [0.0, BOUNDARY]}
GUIDANCE = {"high": 4.0, "low": 3.0}
"""As published: less guidance where there is less noise."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    build(FAMILY, SMALL).save_pretrained(folder / "high")
    # Another depth, so that neither can stand in for the other.
    build(FAMILY, SMALL | {"num_layers": 1}).save_pretrained(folder / "low")
    return {name: str(folder / name) for name in ("high", "low")}


def run_config(folders, trained: str, degree: int = 1, **sampling):
    other = "low" if trained == "high" else "high"
    sequence = {"scheme": "ulysses", "degree": degree} if degree > 1 else {"scheme": "none"}
    return parse_config(
        {
            "model": {"family": "wan", "path": folders[trained]},
            "objective": {"kind": "flow_matching", "sigma_range": RANGES[trained]},
            "parallel": {"sequence": sequence},
            "sampling": {
                "num_steps": 6,
                "seed": 1,
                "guidance_scale": GUIDANCE[trained],
                "other_expert_path": folders[other],
                "other_expert_guidance_scale": GUIDANCE[other],
                **sampling,
            },
        }
    )


SIZES = {"latent_channels": CHANNELS, "text_hidden_size": TEXT_WIDTH, "compute_dtype": torch.float32}


def sample_on_rank(rank: int, world_size: int, folders: dict[str, str], trained: str) -> torch.Tensor:
    config = run_config(folders, trained, world_size)
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model, sequence = build_model(config, mesh, **SIZES)
    embeds, mask = prompts(3)
    return generate_latents(
        model,
        FAMILY,
        build_objective(config.objective, FAMILY),
        LATENT_SHAPE,
        embeds[:2],
        mask[:2],
        (embeds[2], mask[2]),
        bucket=BUCKET,
        fps=16.0,
        sampling=config.sampling,
        sample_keys=["a", "b"],
        sequence=sequence,
        other_expert=build_other_expert(config, mesh, sequence, **SIZES),
    )


@pytest.fixture(scope="module")
def expected(folders) -> torch.Tensor:
    high, low = (WanTransformer3DModel.from_pretrained(folders[name]) for name in ("high", "low"))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipeline = WanPipeline(None, None, None, scheduler, high, low, boundary_ratio=BOUNDARY)
    pipeline.set_progress_bar_config(disable=True)
    embeds, mask = prompts(3)
    # The pipeline pads with zeros what lies beyond a prompt.
    embeds = embeds * mask[..., None]
    return pipeline(
        prompt_embeds=embeds[:2],
        negative_prompt_embeds=embeds[2:].expand(2, TEXT_LENGTH, TEXT_WIDTH),
        height=BUCKET[1],
        width=BUCKET[2],
        num_frames=BUCKET[0],
        num_inference_steps=6,
        guidance_scale=GUIDANCE["high"],
        guidance_scale_2=GUIDANCE["low"],
        latents=torch.stack([keyed_normal(LATENT_SHAPE, 1, "sampling noise", key) for key in ("a", "b")]),
        output_type="latent",
    ).frames


@pytest.mark.parametrize(("world_size", "trained"), [(1, "high"), (1, "low"), (2, "high")])
def test_both_experts_sample_as_in_the_pipeline(folders, expected, world_size, trained):
    for latents in run_ranks(world_size, sample_on_rank, folders, trained):
        assert latents.abs().max() > 0.1
        torch.testing.assert_close(latents, expected, atol=1e-4, rtol=0)


def test_the_boundary_belongs_to_the_expert_for_much_noise():
    low, high = (OtherExpert(torch.nn.Identity(), tuple(RANGES[trained]), 1.0) for trained in ("high", "low"))
    assert [low.takes(t) for t in (999.0, 875.0, 874.9)] == [False, False, True]
    assert [high.takes(t) for t in (999.0, 875.0, 874.9)] == [True, True, False]


def _refusal(rank: int, world_size: int, config) -> str:
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    with pytest.raises(UserError) as refusal:
        build_other_expert(config, mesh, None, **SIZES)
    return str(refusal.value)


@pytest.mark.parametrize("sigma_range", [[0.0, 1.0], [0.2, 0.8]])
def test_a_range_that_leaves_no_expert_its_own_is_refused(folders, sigma_range):
    config = run_config(folders, "high")
    config = config.model_copy(update={"objective": config.objective.model_copy(update={"sigma_range": sigma_range})})
    [message] = run_ranks(1, _refusal, config)
    assert "set it to the trained one's, such as [0.875, 1]" in message


def test_guidance_of_an_expert_that_is_not_there_is_refused(folders):
    with pytest.raises(UserError, match=r"other_expert_guidance_scale 3.0 needs other_expert_path"):
        run_config(folders, "high", other_expert_path=None)


def test_half_a_model_that_is_sampled_alone_is_said(folders, caplog):
    config = run_config(folders, "high", other_expert_path=None, other_expert_guidance_scale=None)
    with caplog.at_level(logging.WARNING):
        assert build_other_expert(config, None, None, **SIZES) is None
    assert "not trained at the other noise levels" in caplog.text
