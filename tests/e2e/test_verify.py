"""`ttv-train verify` finds nothing where there is nothing, and finds each mistake that it makes on purpose."""

import json

import pytest

from ttv_train import cli
from ttv_train.config_file import parse_config, save_config
from ttv_train.verify import FAULTS


def _verify(capsys, *arguments: str) -> tuple[int, dict]:
    code = cli.main(["verify", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_every_family_under_the_schemes_that_it_declares(capsys):
    code, found = _verify(capsys, "--scheme", "ulysses", "dsp", "--degree", "3")
    assert code == 0
    assert found["passed"]
    assert found["worst_gradient_difference"] < 1e-10
    made = [row for row in found["comparisons"] if row["status"] == "passed"]
    assert {row["model"].split(",")[0] for row in made} == {
        "cogvideox", "cogvideox 1.5", "stdit3", "wan", "hunyuan_video", "ltx_video",
    }  # fmt: skip
    assert {row["tokens"] for row in made} >= {1, 2, 3, 5, 7, 24, 45}
    for row in made:
        assert row["bytes_per_block"] == row["formula_bytes_per_block"]
        assert row["bytes_per_block"] > 0 or row["tokens"] == 1
    impossible = {row["model"]: row["reason"] for row in found["comparisons"] if row["status"] == "impossible"}
    assert impossible["wan"] == "wan can be shared by none, ulysses, ring, usp"
    assert "stdit3" not in impossible


def test_rings_in_all_their_modes(capsys):
    code, found = _verify(capsys, "--family", "hunyuan_video", "--scheme", "ring", "usp", "--degree", "4")
    assert code == 0
    assert {row["scheme"] for row in found["comparisons"]} == {"ring, rotate", "ring, gather", "usp 2x2"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found(capsys, fault):
    arguments = "--family", "hunyuan_video", "--scheme", "ulysses", "ring", "--degree", "2", "--inject", fault
    code, found = _verify(capsys, *arguments)
    assert code == 1
    assert not found["passed"]
    failed = [row for row in found["comparisons"] if row["status"] == "failed"]
    assert {row["scheme"] for row in failed} == {"ulysses", "ring, rotate", "ring, gather"}
    assert all(row["parameter"] for row in failed)


def test_a_mistake_that_a_family_cannot_have_is_said(capsys):
    code, found = _verify(capsys, "--family", "wan", "--scheme", "ulysses", "--degree", "2", "--inject", "double-text")
    assert code == 0
    (row,) = found["comparisons"]
    assert row["reason"] == "wan attends to text by cross attention, of which nothing is exchanged"


def test_the_model_of_a_run(capsys, tmp_path):
    config = parse_config(
        {
            "dataset": {"buckets": ["8x48x80"]},
            "vae": {"kind": "wavelet", "spatial_levels": 3, "channels": 4},
            "model": {
                "family": "cogvideox",
                "config": {
                    "num_attention_heads": 3,
                    "attention_head_dim": 16,
                    "num_layers": 1,
                    "time_embed_dim": 8,
                    "use_rotary_positional_embeddings": True,
                },
            },
        }
    )
    save_config(config, tmp_path / "run.yaml")
    arguments = "--config", str(tmp_path / "run.yaml"), "--degree", "4", "--dtype", "float32"
    code, found = _verify(capsys, *arguments, "--scheme", "ring", "ulysses")
    assert code == 0
    assert {row["scheme"]: row["status"] for row in found["comparisons"]} == {
        "ulysses": "impossible",
        "ring, rotate": "passed",
        "ring, gather": "passed",
    }
    assert "the model has 3" in next(row["reason"] for row in found["comparisons"] if row["scheme"] == "ulysses")


def test_a_model_that_cannot_be_loaded_is_no_proof(capsys, tmp_path):
    config = parse_config({"vae": {"kind": "wavelet"}, "dataset": {"buckets": ["8x48x80"]}, "model": {"path": "/none"}})
    save_config(config, tmp_path / "run.yaml")
    assert cli.main(["verify", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "model.path" in capsys.readouterr().err
