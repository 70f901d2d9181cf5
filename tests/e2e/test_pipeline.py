"""From a trained run to videos, a diffusers folder and a report; and what a dry run leaves alone."""

import json
import shutil
from pathlib import Path

import av
import pytest
import torch
import yaml
from diffusers import CogVideoXTransformer3DModel

from tests.e2e.conftest import launch
from ttv_train.data.shards import LatentStore

ULYSSES_2 = ("--parallel.sequence.scheme", "ulysses", "--parallel.sequence.degree", "2")


@pytest.fixture(scope="module")
def trained(encoded, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    launch(
        2,
        *("train", "--config", str(encoded), "--output_dir", str(folder), *ULYSSES_2),
        *("--validation.num_videos", "1", "--tracking.trackers", "[tensorboard]"),
    )
    return folder


def test_a_run_folder_holds_what_the_readme_says(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["sequence_parallel"] == {"scheme": "ulysses", "degree": 2}
    assert summary["steps"] == 6
    assert summary["clips"] == {"encoded": 12, "quarantined": 0}
    assert summary["storage"]["disk_bytes"] > 0
    assert (summary["storage"]["alluxio_bytes"], summary["storage"]["hit_rate"]) == (0, None)
    assert set(summary["step_seconds"]) == {"data", "forward", "backward", "communication", "optimizer"}
    for rate in ("frames_per_second", "tokens_per_second", "peak_memory_bytes"):
        assert summary[rate] > 0
    for loss in ("train_loss", "validation_loss"):
        assert set(summary[loss]) == {"first", "last"}
    assert [path.name for path in sorted((trained / "checkpoints").glob("step-*"))] == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    assert all((path / "manifest.json").is_file() for path in (trained / "checkpoints").iterdir())
    assert sorted(path.name for path in (trained / "samples").iterdir()) == [
        "step-00000000",
        "step-00000003",
        "step-00000006",
    ]
    assert list((trained / "trackers").rglob("events.out.tfevents*"))
    assert "<html" in (trained / "report.html").read_text()
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "validation"] == [0, 3, 6]
    first = next(record for record in records if record["kind"] == "train")
    assert first["communication"]["ulysses"]["bytes"] > 0
    assert first["storage"]["bytes"]["disk"] > 0


def test_sampling_gives_a_video_per_caption_of_the_clips_shape(trained):
    launch(2, "sample", "--config", str(trained / "config.resolved.yaml"))
    folder = trained / "samples/step-00000006"
    rows = json.loads((folder / "prompts.json").read_text())
    captions = {json.loads(line)["text"] for line in Path("data/sample/metadata.jsonl").read_text().splitlines()}
    assert captions <= {row["prompt"] for row in rows}
    for row in rows:
        with av.open(str(folder / row["file"])) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 4
        assert frames[0].shape == (80, 48, 3)


def test_own_prompts_on_one_process_go_to_the_output_folder(trained, tmp_path):
    launch(
        1,
        *("sample", "--config", str(trained / "config.resolved.yaml")),
        *("--parallel.sequence.scheme", "none", "--parallel.sequence.degree", "1"),
        *("--prompt", "a dog", "--prompt", "a/../dog", "--output", str(tmp_path / "videos")),
    )
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "00-a-dog.mp4",
        "01-a-dog.mp4",
        "prompts.json",
    ]


def test_an_exported_checkpoint_is_a_diffusers_model(trained, tmp_path):
    launch(1, "export", "--config", str(trained / "config.resolved.yaml"), "--output", str(tmp_path / "model"))
    model = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "model")
    assert model.config.num_attention_heads == 3
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_dry_run_writes_nothing(encoded, tmp_path):
    """Also before anything is encoded: it then trains on random latents of the same shape."""
    for latents in ([], ["--latents.path", str(tmp_path / "none")]):
        done = launch(
            1, "train", "--config", str(encoded), "--dry-run", "--output_dir", str(tmp_path / "run"), *latents
        )
        assert "dry run: 1 process(es), cogvideox" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_latent_is_replaced_quarantined_and_named_in_the_report(encoded, run_folder, tmp_path):
    latents = tmp_path / "latents"
    launch(1, "encode", "--config", str(encoded), "--latents.path", str(latents), "--output_dir", str(run_folder))
    store = LatentStore.open(str(latents))
    entry = next(entry for entry in store.entries if not entry.is_last_clip)
    shard = latents / entry.shard
    content = bytearray(shard.read_bytes())
    content[entry.offset + entry.length - 1] ^= 1
    shard.write_bytes(content)
    launch(
        1,
        *("train", "--config", str(encoded), "--latents.path", str(latents), "--output_dir", str(run_folder)),
        *("--latents.max_bad_fraction", "0.5"),
    )
    rows = [json.loads(line) for line in (run_folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["name"], row["stage"]) for row in rows] == [(entry.source_name, "train")]
    assert entry.key in rows[0]["reason"]
    assert entry.key in (run_folder / "report.html").read_text()


def test_a_checkpoint_copied_under_another_name_is_sampled(trained, tmp_path):
    shutil.copytree(trained / "checkpoints/step-00000004", tmp_path / "best")
    launch(
        1,
        *("sample", "--config", str(trained / "config.resolved.yaml"), "--checkpoint", str(tmp_path / "best")),
        *("--parallel.sequence.scheme", "none", "--parallel.sequence.degree", "1", "--prompt", "a dog"),
    )
    assert (trained / "samples/step-00000004/00-a-dog.mp4").is_file()


def test_stdit3_trains_with_captions_shorter_than_its_own_null_prompt(encoded, run_folder):
    config = yaml.safe_load(encoded.read_text())
    config["model"] = {
        "family": "stdit3",
        "config": {"hidden_size": 48, "depth": 1, "num_heads": 3, "model_max_length": 12, "pred_sigma": False},
    }
    config["objective"] = {"kind": "flow_matching", "caption_dropout": 0.5}
    config["validation"]["num_videos"] = 1
    run_folder.mkdir()
    path = run_folder / "stdit3.yaml"
    path.write_text(yaml.safe_dump(config))
    launch(
        2,
        *("train", "--config", str(path), "--output_dir", str(run_folder), "--training.steps", "3"),
        *("--parallel.sequence.scheme", "dsp", "--parallel.sequence.degree", "2"),
    )
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["steps"] == 3
    done = launch(1, "train", "--config", str(path), "--dry-run", "--model.config.model_max_length", "4", check=False)
    assert done.returncode == 2
    assert "text_encoder.max_length 8" in done.stderr
