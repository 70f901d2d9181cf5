"""Clips that cannot be decoded or encoded when they are asked for are corrupt samples."""

import pytest
import torch

from tests.video_files import damage_frame, write_video
from ttv_train.config import RunConfig
from ttv_train.data.online import open_online
from ttv_train.data.shards import CorruptSampleError, LatentSample
from ttv_train.errors import UserError


def make_config(folder, **sections):
    data = {
        "output_dir": str(folder / "run"),
        "dataset": {"path": str(folder), "fps": 24, "buckets": ["8x64x96"], "max_clips_per_video": 3},
        "vae": {"kind": "wavelet", "spatial_levels": 2, "temporal_levels": 1},
        "latents": {"online": True},
    }
    return RunConfig.model_validate(data | sections)


def test_a_damaged_clip_is_a_corrupt_sample(tmp_path):
    path = write_video(tmp_path / "a.mp4", 24, options={"g": "8", "sc_threshold": "0"})
    damage_frame(path, 8)
    (tmp_path / "a.txt").write_text("Bars.")
    dataset = open_online(make_config(tmp_path), torch.device("cpu"), writes=True)
    assert [entry.clip_index for entry in dataset.entries] == [0, 1, 2]
    first, damaged, last = dataset.read_many(dataset.entries)
    for entry, sample in ((dataset.entries[0], first), (dataset.entries[2], last)):
        assert isinstance(sample, LatentSample)
        assert sample.mean.shape == entry.latent_shape
    assert isinstance(damaged, CorruptSampleError)
    assert "a.mp4" in str(damaged)
    assert "damaged" in str(damaged)
    assert dataset.null_prompt()[0].shape[-1] == first.prompt_embeds.shape[-1]
    assert (tmp_path / "run/dataset.parquet").exists()


def test_a_dataset_without_a_clip_is_refused_and_a_dry_run_writes_nothing(tmp_path):
    (tmp_path / "a.mp4").write_text("No video.")
    (tmp_path / "a.txt").write_text("Nothing.")
    with pytest.raises(UserError, match=r"it gives no clip; `ttv-train check-data` says why"):
        open_online(make_config(tmp_path), torch.device("cpu"), writes=False)
    assert not (tmp_path / "run").exists()
