"""Training refuses latents of a video that has changed since it was encoded, by name, until it is encoded again."""

import json
import os
import shutil

import pytest
import yaml

from tests.e2e.conftest import REPOSITORY, TINY_RUN
from ttv_train import cli

CLIPS = ("dog.mp4", "skyscraper.mp4")


@pytest.fixture
def config(tmp_path):
    """A run of two clips that lie in a folder of their own."""
    dataset = tmp_path / "clips"
    dataset.mkdir()
    sample = REPOSITORY / "data" / "sample"
    rows = [json.loads(line) for line in (sample / "metadata.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["file_name"] in CLIPS]
    (dataset / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    for name in CLIPS:
        shutil.copy(sample / name, dataset / name)
    run = {
        **TINY_RUN,
        "output_dir": str(tmp_path / "run"),
        "dataset": {**TINY_RUN["dataset"], "path": str(dataset)},
        "latents": {"path": str(tmp_path / "latents")},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_a_changed_video_is_refused_until_it_is_encoded_again(config, capsys):
    command = ["train", "--config", str(config), "--dry-run"]
    assert cli.main(["encode", "--config", str(config)]) == 0
    assert cli.main(command) == 0

    dog = config.parent / "clips" / "dog.mp4"
    shutil.copy(config.parent / "clips" / "skyscraper.mp4", dog)
    os.utime(dog, (1, 1))
    capsys.readouterr()
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "dog.mp4 has changed since the latents" in error
    assert "run `ttv-train encode`" in error

    assert cli.main(["encode", "--config", str(config)]) == 0
    assert cli.main(command) == 0


def test_a_video_that_is_gone_has_not_changed(config):
    assert cli.main(["encode", "--config", str(config)]) == 0
    (config.parent / "clips" / "dog.mp4").unlink()
    assert cli.main(["train", "--config", str(config), "--dry-run"]) == 0
