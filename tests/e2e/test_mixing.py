"""Training on two encoded datasets, mixed by weight."""

import json

import pytest
import yaml

from tests.e2e.conftest import TINY_RUN, launch, losses


@pytest.fixture(scope="module")
def mixed(encoded, tmp_path_factory):
    """Config of a run on the sample, encoded once upright and once lying down; the second counts three times."""
    folder = tmp_path_factory.mktemp("mixed")
    upright = yaml.safe_load(encoded.read_text())["latents"]["path"]
    lying = folder / "lying"
    launch(
        1,
        *("encode", "--config", str(encoded), "--output_dir", str(folder / "encode")),
        *("--dataset.buckets", "[4x48x80]", "--latents.path", str(lying)),
    )
    sources = [{"path": upright, "weight": 1}, {"path": str(lying), "weight": 3}]
    training = {**TINY_RUN["training"], "bucket_batch_sizes": {"4x48x80": 2}}
    path = folder / "mixed.yaml"
    path.write_text(yaml.safe_dump({**TINY_RUN, "latents": {"sources": sources}, "training": training}))
    return path


def consumed(run_folder):
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [record["samples_consumed"] for record in records if record["kind"] == "train"]


def test_sources_are_mixed_alike_on_any_number_of_ranks_and_after_a_restart(mixed, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(1, "train", "--config", str(mixed), "--output_dir", str(whole))
    launch(2, "train", "--config", str(mixed), "--output_dir", str(parts), "--training.steps", "4")
    launch(1, "train", "--config", str(mixed), "--output_dir", str(parts))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    assert consumed(parts) == consumed(whole)
    end = consumed(whole)[-1]
    paths = [source["path"] for source in yaml.safe_load(mixed.read_text())["latents"]["sources"]]
    assert (end[paths[0]] % 4, end[paths[1]] % 2) == (0, 0)  # of their batches of 4 and 2
    buckets = {json.loads(line).get("bucket") for line in (whole / "metrics.jsonl").read_text().splitlines()}
    assert {"4x80x48", "4x48x80"} <= buckets
