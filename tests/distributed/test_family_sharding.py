"""Every family as a run builds it: sequence shared, blocks recomputed, parameters sharded; equal to one process."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.unit.models.tiny import LATENT_SHAPE, TEXT_WIDTH, TINY, build_tiny, predict_tiny
from ttv_train.config_file import parse_config
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.parallel.mesh import build_mesh

CASES = [*((name, "ulysses") for name in FAMILIES), ("stdit3", "dsp")]


def _loss_and_gradients(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    prediction = predict_tiny(name, model, torch.tensor([17.0, 803.0]))
    weights = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(2))
    loss = (prediction * weights).sum()
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _run(rank: int, world_size: int, name: str, scheme: str) -> dict[str, torch.Tensor]:
    config = parse_config(
        {
            "model": {"family": name, "config": TINY[name]},
            "parallel": {
                "sequence": {"scheme": scheme, "degree": world_size},
                "activation_checkpointing": True,
            },
        }
    )
    mesh = build_mesh(config.parallel, torch.device("cpu"))
    model, _ = build_model(
        config,
        mesh,
        latent_channels=LATENT_SHAPE[0],
        text_hidden_size=TEXT_WIDTH,
        compute_dtype=torch.float32,
    )
    results = _loss_and_gradients(name, model)
    dist.all_reduce(results["loss"])
    return {
        key.replace("_checkpoint_wrapped_module.", ""): value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in results.items()
    }


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_loss_and_gradients_equal_one_process(name, scheme):
    expected = _loss_and_gradients(name, build_tiny(name))
    for results in run_ranks(2, _run, name, scheme):
        assert results.keys() == expected.keys()
        for key, value in expected.items():
            scale = max(float(value.norm()), 1e-2)
            assert float((results[key] - value).norm()) / scale < 1e-5, key
