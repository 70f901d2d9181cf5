"""From a family's pipeline folder to a video: clips encoded, a model trained and sampled, all with the folder's parts.

The folders are tiny and random; everything else is as users have it.
"""

import json
import signal

import pytest
import torch
import yaml
from PIL import Image

from tests.e2e.conftest import TINY_RUN, losses
from tests.unit.encoders.tiny_models import save_image_encoder, save_text_pipeline, save_vae
from tests.unit.models.tiny import TINY
from ttv_train import cli
from ttv_train.config import ModelConfig
from ttv_train.data.shards import LatentStore
from ttv_train.models import FAMILIES

pytest.importorskip("ftfy")
pytest.importorskip("bs4")

VAES = {
    "cogvideox": ("AutoencoderKLCogVideoX", 4),
    # Open-Sora's own VAE is not one of diffusers.
    "stdit3": ("AutoencoderKLCogVideoX", 4),
    "wan": ("AutoencoderKLWan", 16),
    "hunyuan_video": ("AutoencoderKLHunyuanVideo", 4),
    "ltx_video": ("AutoencoderKLLTXVideo", 8),
}
"""Class and latent channels."""


def save_pipeline(folder, family: str, image_to_video: bool) -> None:
    """Every model of a pipeline, where its pipeline has it."""
    save_text_pipeline(folder, family)
    vae, channels = VAES[family]
    save_vae(folder / "vae", vae)
    settings = TINY[family] | ({"model_max_length": 300} if family == "stdit3" else {})
    if image_to_video:
        save_image_encoder(folder)
        settings |= {"in_channels": 2 * channels + 4, "image_dim": 12, "added_kv_proj_dim": 36}
    torch.manual_seed(0)
    model = FAMILIES[family].build(
        ModelConfig(family=family, config=settings), latent_channels=channels, text_hidden_size=16
    )
    model.save_pretrained(folder / "transformer")


@pytest.fixture(autouse=True)
def own_sigterm():
    """Training in this process takes the signal's handler; it is given back."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(("family", "image_to_video"), [*((family, False) for family in FAMILIES), ("wan", True)])
def test_a_pipeline_folder_is_trained_and_sampled(family, image_to_video, tmp_path):
    pipeline = tmp_path / "pipeline"
    save_pipeline(pipeline, family, image_to_video)
    config = {
        **TINY_RUN,
        "output_dir": str(tmp_path / "run"),
        "latents": {"path": str(tmp_path / "latents")},
        "dataset": {**TINY_RUN["dataset"], "buckets": ["9x64x96"], "max_clips_per_video": 1},
        "vae": {"kind": "diffusers", "path": str(pipeline / "vae"), "dtype": "float32"},
        "text_encoder": {"kind": "transformers", "path": str(pipeline), "recipe": family, "dtype": "float32"},
        "model": {"family": family, "path": str(pipeline / "transformer")},
        "objective": {"kind": "velocity" if family == "cogvideox" else "flow_matching"},
        "training": {**TINY_RUN["training"], "steps": 2, "global_batch_size": 2},
        "validation": {"every_steps": 2, "holdout": "none", "max_clips": 1, "num_videos": 1},
    }
    if image_to_video:
        config["first_frame"] = {"enabled": True, "image_encoder_path": str(pipeline)}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))

    assert cli.main(["encode", "--config", str(path)]) == 0
    store = LatentStore.open(str(tmp_path / "latents"))
    # Captions are stored at their own length, where the family does not see their padding.
    lengths = [len(store.read(entry).prompt_mask) for entry in store.entries]
    kept = family == "cogvideox"
    assert lengths == [226 if kept else entry.num_text_tokens for entry in store.entries]
    assert cli.main(["train", "--config", str(path)]) == 0
    assert len(losses(tmp_path / "run")) == 2

    arguments = ["--prompt", "A dog wakes.", "--output", str(tmp_path / "videos")]
    if image_to_video:
        Image.new("RGB", (100, 70), (200, 30, 30)).save(tmp_path / "red.png")
        arguments += ["--image", str(tmp_path / "red.png")]
    assert cli.main(["sample", "--config", str(path), *arguments]) == 0
    (row,) = json.loads((tmp_path / "videos/prompts.json").read_text())
    assert (tmp_path / "videos" / row["file"]).stat().st_size > 0
