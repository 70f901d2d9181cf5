import pytest
import torch
from diffusers import CogVideoXTransformer3DModel

from ttv_train.checkpoint.export import export
from ttv_train.ema import Ema
from ttv_train.errors import UserError

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 1,
    "text_embed_dim": 6,
    "time_embed_dim": 4,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 5,
    "max_text_seq_length": 3,
}


def assert_same_state(found, expected):
    expected, found = expected.state_dict(), found.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("rotary", [False, True])
def test_from_pretrained_loads_an_exported_model(tmp_path, rotary):
    model = CogVideoXTransformer3DModel(**CONFIG, use_rotary_positional_embeddings=rotary)
    assert export(model, tmp_path / "out") == tmp_path / "out"
    loaded = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out")
    assert_same_state(loaded, model)
    assert loaded.config["text_embed_dim"] == 6
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_in_another_type_the_model_itself_keeps_its_own(tmp_path):
    model = CogVideoXTransformer3DModel(**CONFIG)
    export(model, tmp_path / "out", torch.bfloat16)
    loaded = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert torch.equal(loaded.proj_out.weight, model.proj_out.weight.bfloat16())
    assert model.proj_out.weight.dtype == torch.float32


def test_the_average_is_exported_while_it_is_applied(tmp_path):
    model = CogVideoXTransformer3DModel(**CONFIG)
    ema = Ema(model, 0.5)
    start = model.proj_out.weight.detach().clone()
    with torch.no_grad():
        model.proj_out.weight.add_(1)
    with ema.applied(model):
        export(model, tmp_path / "out")
    assert torch.equal(CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out").proj_out.weight, start)
    assert torch.equal(model.proj_out.weight, start + 1)


def test_an_existing_folder_is_not_touched(tmp_path):
    with pytest.raises(UserError, match="exists"):
        export(CogVideoXTransformer3DModel(**CONFIG), tmp_path)
    assert list(tmp_path.iterdir()) == []
