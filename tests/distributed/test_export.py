import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from tests.unit.checkpoint.test_export import CONFIG, assert_same_state
from ttv_train.checkpoint.export import export
from ttv_train.errors import UserError


def export_sharded(rank, world_size, folder):
    torch.manual_seed(3)
    model = CogVideoXTransformer3DModel(**CONFIG)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in [*model.transformer_blocks, model]:
        fully_shard(module, mesh=mesh)
    export(model, folder)
    with pytest.raises(UserError, match="exists"):
        export(model, folder)


def test_a_sharded_model_is_exported_whole(tmp_path):
    run_ranks(3, export_sharded, tmp_path / "out")
    torch.manual_seed(3)
    loaded = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "out")
    assert_same_state(loaded, CogVideoXTransformer3DModel(**CONFIG))
