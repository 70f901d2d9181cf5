"""Twenty optimizer steps of every family have the same loss curve under every scheme of sequence parallelism.

The steps are those of a run: its loader, its sharded model, its AdamW, on latents in memory. Nothing divides: three
heads, 45 tokens (15 locations under dsp), captions of every length.
"""

from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import pytest
import torch

from tests.harness import run_ranks
from tests.latent_samples import MemoryDataset, make_entry
from tests.unit.models.tiny import TINY
from ttv_train.config_file import parse_config
from ttv_train.devices import get_backend
from ttv_train.models import FAMILIES
from ttv_train.parallel.mesh import build_mesh
from ttv_train.train import Trainer

STEPS = 20
LATENT_SHAPE, TEXT_WIDTH, TEXT_LENGTH = (4, 3, 6, 10), 7, 5
LAYOUTS = {
    "none": {},
    "ulysses-2": {"scheme": "ulysses", "degree": 2},
    "ring-2": {"scheme": "ring", "degree": 2},
    "usp-2x2": {"scheme": "usp", "degree": 4, "ulysses_degree": 2},
    "dsp-2": {"scheme": "dsp", "degree": 2},
}


class RaggedDataset(MemoryDataset):
    """Six clips whose captions have one to five tokens, as wide as the tiny models take."""

    def __init__(self) -> None:
        super().__init__(
            [
                make_entry(
                    number, bucket=(9, 48, 80), latent_shape=LATENT_SHAPE, num_text_tokens=number % TEXT_LENGTH + 1
                )
                for number in range(6)
            ]
        )

    def read(self, entry):
        sample = super().read(entry)
        generator = torch.Generator().manual_seed(entry.num_text_tokens)
        sample.prompt_embeds = torch.randn(entry.num_text_tokens, TEXT_WIDTH, generator=generator)
        return sample

    def null_prompt(self):
        return torch.full((1, TEXT_WIDTH), 0.5), torch.ones(1, dtype=torch.bool)


def _curve(rank: int, world_size: int, family: str, layout: str) -> list[float]:
    config = parse_config(
        {
            "seed": 5,
            "text_encoder": {"kind": "hash", "hidden_size": TEXT_WIDTH, "max_length": TEXT_LENGTH},
            "model": {"family": family, "config": TINY[family]},
            "objective": {"kind": "velocity" if family == "cogvideox" else "flow_matching", "caption_dropout": 0.3},
            "parallel": {"sequence": LAYOUTS[layout]},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
            "training": {"steps": STEPS, "global_batch_size": 2, "micro_batch_size": 2, "precision": "float32"},
            "validation": {"holdout": "none", "max_clips": 1},
        }
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    assert mesh.data_degree == 1
    with patch("ttv_train.train.open_dataset", lambda *args, **options: RaggedDataset()):
        trainer = Trainer(config, mesh, get_backend("cpu"), ExitStack(), dry_run=True)
    steps = trainer.loader.steps(0, STEPS)
    return [trainer.train_step(next(steps), step).loss for step in range(STEPS)]


@cache
def one_process(family: str) -> list[float]:
    return run_ranks(1, _curve, family, "none")[0]


CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS if layout not in ("none", "dsp-2")]


@pytest.mark.parametrize(("family", "layout"), [*CASES, ("stdit3", "dsp-2")])
def test_the_loss_curve_is_that_of_one_process(family, layout):
    expected = one_process(family)
    assert len(set(expected)) == STEPS
    for curve in run_ranks(LAYOUTS[layout]["degree"], _curve, family, layout):
        assert curve == pytest.approx(expected, rel=1e-5, abs=0)
