"""Image-to-video Wan through the steps of a run: first frames reach the model, on two ranks as on one."""

from contextlib import ExitStack

import pytest
import torch

from tests.harness import run_ranks
from tests.unit.models.tiny import TEXT_LENGTH, TEXT_WIDTH, TINY
from ttv_train.config_file import parse_config
from ttv_train.devices import get_backend
from ttv_train.models import FAMILIES
from ttv_train.parallel.mesh import build_mesh
from ttv_train.train import Trainer

STEPS = 4


def _train(rank: int, world_size: int, scheme: str, without_frame: bool) -> list[float]:
    config = parse_config(
        {
            "seed": 5,
            "dataset": {"buckets": ["4x48x80"]},
            "vae": {"kind": "wavelet", "spatial_levels": 3, "temporal_levels": 1, "channels": 4},
            "text_encoder": {"kind": "hash", "hidden_size": TEXT_WIDTH, "max_length": TEXT_LENGTH},
            "first_frame": {"enabled": True},
            "model": {"family": "wan", "config": {**TINY["wan"], "in_channels": 12}},
            "objective": {"kind": "flow_matching"},
            "parallel": {"sequence": {"scheme": scheme, "degree": world_size}},
            "optimizer": {"learning_rate": 1e-2},
            "training": {"steps": STEPS, "global_batch_size": 2, "micro_batch_size": 2, "precision": "float32"},
            "validation": {"holdout": "none", "max_clips": 1},
        }
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    trainer = Trainer(config, mesh, get_backend("cpu"), ExitStack(), dry_run=True)
    assert FAMILIES["wan"].takes_first_frame(trainer.model)
    losses = []
    steps = trainer.loader.steps(0, STEPS)
    for step in range(STEPS):
        batches = next(steps)
        for batch in batches:
            # Before anything is encoded, a clip stands in for its first frame.
            assert torch.equal(batch.first_frame.latents, batch.latents)
            if without_frame:
                batch.first_frame.latents.zero_()
        losses.append(trainer.train_step(batches, step).loss)
    return losses


def test_training_with_first_frames_is_the_same_on_two_ranks():
    [expected] = run_ranks(1, _train, "none", False)
    for curve in run_ranks(2, _train, "ulysses", False):
        assert curve == pytest.approx(expected, rel=1e-5)
    [without] = run_ranks(1, _train, "none", True)
    assert without != pytest.approx(expected, rel=1e-5)
