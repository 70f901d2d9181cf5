"""Training on clips that are encoded as they are needed: as on latents that were encoded before."""

import json

import pytest

from tests.e2e.conftest import launch, losses


def test_the_loss_curve_is_that_of_encoded_latents(encoded, tmp_path):
    stored, online = tmp_path / "stored", tmp_path / "online"
    options = ["--config", str(encoded), "--training.steps", "3"]
    launch(1, "train", *options, "--output_dir", str(stored))
    options += ["--latents.online", "true", "--latents.path", str(tmp_path / "absent")]
    launch(2, "train", *options, "--output_dir", str(online))
    assert losses(online) == pytest.approx(losses(stored), rel=1e-6)
    assert not (tmp_path / "absent").exists()
    clips = [json.loads((folder / "summary.json").read_text())["clips"] for folder in (stored, online)]
    assert clips[0] == clips[1]
    launch(1, "export", *options, "--output_dir", str(online), "--output", str(tmp_path / "model"))
    assert list((tmp_path / "model").rglob("config.json"))
