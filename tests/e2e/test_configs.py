"""Every shipped config loads, and builds and takes a step once its weights are swapped for a tiny model."""

from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import REPOSITORY, TINY_RUN
from tests.unit.models.tiny import TEXT_LENGTH, TINY
from ttv_train import cli
from ttv_train.config_file import load_config, save_config
from ttv_train.diffusion import build_objective
from ttv_train.models import FAMILIES

TRAIN_CONFIGS = sorted((REPOSITORY / "configs/train").glob("*.yaml"))
WEIGHTS = ("vae", "text_encoder", "model", "device")
"""Sections that name weights or hardware, which tests do not have."""


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_a_train_config_loads_and_survives_being_saved(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_a_train_config_fits_its_family(path):
    """What is decided when the model is built, whose weights tests do not have."""
    config = load_config(path)
    family = FAMILIES[config.model.family]
    assert config.parallel.sequence.scheme in family.sequence_schemes
    assert getattr(config.text_encoder, "recipe", None) in (None, family.name)
    objective = build_objective(config.objective, family)
    assert config.sampling.solver in (None, *objective.solvers)
    if config.sampling.other_expert_path is not None:
        assert config.objective.sigma_range != (0.0, 1.0)


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_a_train_config_takes_a_step(path, tmp_path, capsys):
    content = yaml.safe_load(path.read_text())
    family = content.get("model", {}).get("family", "cogvideox")
    content |= {section: TINY_RUN[section] for section in WEIGHTS}
    content["model"] = {"family": family, "config": TINY[family]}
    if content.get("first_frame", {}).pop("image_encoder_path", None):
        content["model"]["config"] = {**TINY[family], "in_channels": 2 * TINY_RUN["vae"]["channels"] + 4}
    content["text_encoder"] = {**TINY_RUN["text_encoder"], "max_length": TEXT_LENGTH}
    content["dataset"]["buckets"] = TINY_RUN["dataset"]["buckets"]
    content["parallel"]["sequence"] = {"scheme": "none"}
    content["training"]["global_batch_size"] = 2
    content["output_dir"] = str(tmp_path / "run")
    content["latents"]["path"] = str(tmp_path / "latents")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert cli.main(["train", "--config", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert "dry run: 1 process(es)" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_accelerate_config_is_one(path: Path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    assert config.mixed_precision == "no"
