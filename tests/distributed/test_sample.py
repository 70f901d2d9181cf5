"""Sampling on several ranks: the same videos as one process, whichever axes the ranks form."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from tests.harness import run_ranks
from ttv_train.config_file import parse_config
from ttv_train.diffusion import build_objective
from ttv_train.encoders.vae import build_vae
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.monitor.samples import read_prompts
from ttv_train.parallel.mesh import build_mesh
from ttv_train.prompts import encode_prompts
from ttv_train.sample import Sampler

PROMPTS = ["A dog", "A rabbit", "A tower"]
CONFIG = {
    "dataset": {"fps": 8, "buckets": ["4x48x32"]},
    "vae": {"kind": "wavelet", "spatial_levels": 3, "temporal_levels": 1, "channels": 4},
    "text_encoder": {"kind": "hash", "hidden_size": 8, "max_length": 5},
    "model": {
        "config": {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "num_layers": 2,
            "time_embed_dim": 8,
            "use_rotary_positional_embeddings": True,
        }
    },
    "training": {"precision": "float32"},
    "sampling": {"num_steps": 3, "guidance_scale": 2.0},
}


def write_on_rank(rank: int, world_size: int, degree: int, folder: Path, prompts: list[str]) -> list[Path] | str:
    scheme = "ulysses" if degree > 1 else "none"
    config = parse_config({**CONFIG, "parallel": {"sequence": {"scheme": scheme, "degree": degree}}})
    device = torch.device("cpu")
    mesh = build_mesh(config.parallel, device)
    vae = build_vae(config.vae, device)
    model, sequence = build_model(
        config, mesh, latent_channels=vae.latent_channels, text_hidden_size=8, compute_dtype=torch.float32
    )
    requests, null_prompt = encode_prompts(config, prompts, device)
    family = FAMILIES[config.model.family]
    sampler = Sampler(
        model=model,
        family=family,
        objective=build_objective(config.objective, family),
        sequence=sequence,
        mesh=mesh,
        vae=vae,
        null_prompt=null_prompt,
        max_text_tokens=5,
        compute_dtype=torch.float32,
        config=config.sampling,
    )
    try:
        return sampler.write_videos(requests, folder, folder / "videos")
    except OSError as error:
        return str(error)


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[np.ndarray]:
    [paths] = run_ranks(1, write_on_rank, 1, tmp_path_factory.mktemp("alone"), PROMPTS)
    return [frames(path) for path in paths]


@pytest.mark.parametrize(("world_size", "degree"), [(2, 2), (2, 1), (4, 2), (3, 3)])
def test_every_layout_gives_the_same_videos(tmp_path, alone, world_size, degree):
    results = run_ranks(world_size, write_on_rank, degree, tmp_path, PROMPTS)
    folder = tmp_path / "videos"
    names = ["00-a-dog.mp4", "01-a-rabbit.mp4", "02-a-tower.mp4"]
    assert results == world_size * [[folder / name for name in names]]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "prompts.json"]
    assert [row.prompt for row in read_prompts(folder)] == PROMPTS
    for name, expected in zip(names, alone, strict=True):
        video = frames(folder / name)
        assert video.shape == (4, 48, 32, 3)
        # One rounding to another level of uint8 may move a few more in the encoder.
        assert np.abs(video.astype(int) - expected).mean() < 0.5
    assert np.abs(alone[0].astype(int) - alone[1]).mean() > 5


def test_a_prompt_given_twice_gives_two_videos(tmp_path):
    [paths] = run_ranks(1, write_on_rank, 1, tmp_path, ["A dog", "A dog"])
    first, second = (frames(path) for path in paths)
    assert np.abs(first.astype(int) - second).mean() > 5


def test_a_file_that_cannot_be_written_stops_every_rank(tmp_path):
    (tmp_path / "videos").write_text("a file where the folder should be")
    problems = run_ranks(2, write_on_rank, 2, tmp_path, PROMPTS)
    assert all("videos" in problem for problem in problems)
