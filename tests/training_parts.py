"""A model with every awkward kind of tensor, its optimizer and its average, for tests of what keeps them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ttv_train.checkpoint.state import model_tensors, optimizer_tensors
from ttv_train.ema import Ema


class TinyModel(nn.Module):
    """Dimensions that no number of ranks divides, parameters with fewer rows than ranks, a frozen one, buffers."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.ones(1, 1, width))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(11))
        self.register_buffer("table", torch.randn(3, 2, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.gain)


class Parts:
    """Model, AdamW and average, sharded over all ranks where there is a process group."""

    def __init__(self, seed: int, *, width: int = 7, reshard_after_forward: bool = True, wrap: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = TinyModel(width)
        blocks = list(self.model.blocks)
        if wrap:
            apply_activation_checkpointing(self.model, check_fn=lambda module: module in blocks)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in [*blocks, self.model]:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
        decaying = [self.model.head.weight, self.model.gain]
        others = [parameter for parameter in self.model.parameters() if all(parameter is not one for one in decaying)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decaying, "lr": 0.03}, {"params": others, "lr": 0.01, "weight_decay": 0.0}]
        )
        self.ema = Ema(self.model, decay=0.9)
        self.width = width

    def loss(self) -> torch.Tensor:
        """The same on every rank, whatever the number of ranks."""
        generator = torch.Generator().manual_seed(5)
        return self.model(torch.randn(3, 4, self.width, generator=generator)).square().mean()

    def train(self, steps: int, start: int = 0) -> None:
        for step in range(start, start + steps):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update(step)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that training has changed, whole, on every rank."""
        named = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        named |= {f"ema.{name}": tensor for name, tensor in self.ema.state_dict().items()}
        named |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self.model, self.optimizer).items()}
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in named.items()
        }

    @property
    def learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
