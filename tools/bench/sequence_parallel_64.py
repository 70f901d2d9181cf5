"""Bytes that each scheme sends at 64 ranks, beside the formulas: one process and torch's fake process group.

Exchanges are made with tensors of the real sizes and counted; the attention between them is left out, since no value is
looked at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence import build_sequence_parallel
from ttv_train.parallel.sequence.traffic import AttentionShape, attention_bytes, switch_bytes

WORLD_SIZE = 64
MODELS = {
    # Tokens of 81 frames of 720x1280, and of 102 frames for STDiT3, whose spatial layers attend within a latent frame.
    "Wan-14B 720p": AttentionShape(batch=1, tokens=75600, heads=40, key_heads=40, channels=128, itemsize=2),
    "STDiT3 720p": AttentionShape(batch=34, tokens=3600, heads=16, key_heads=16, channels=72, itemsize=2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ulysses": {"scheme": "ulysses"},
    "ring, rotate": {"scheme": "ring", "ring_mode": "rotate"},
    "ring, rotate, bfloat16 gradients": {"scheme": "ring", "ring_mode": "rotate", "ring_gradient_dtype": "bfloat16"},
    "ring, gather": {"scheme": "ring", "ring_mode": "gather"},
    "usp 8x8": {"scheme": "usp", "ulysses_degree": 8, "ring_mode": "rotate"},
    "usp 4x16": {"scheme": "usp", "ulysses_degree": 4, "ring_mode": "rotate"},
}


@contextmanager
def no_attention() -> Iterator[None]:
    """Within it attention returns what it has, so that only exchanges take time."""

    def forward(block: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(block.query), torch.zeros(block.query.shape[:3])

    def backward(block: Any, grad_out: Any, out: Any, lse: Any) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(block.query), torch.zeros_like(block.key), torch.zeros_like(block.value)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return query + key.sum() + value.sum()

    messages = "ttv_train.parallel.sequence.block_messages"
    with (
        patch(f"{messages}.block_attention", forward),
        patch(f"{messages}.block_attention_backward", backward),
        patch("ttv_train.parallel.sequence.ring.attention", attend),
        patch("ttv_train.parallel.sequence.ulysses.attention", attend),
    ):
        yield


def count(settings: dict[str, Any], shape: AttentionShape) -> tuple[int, int]:
    """Bytes that rank 0 sends for one attention, forward and backward: counted and by the formula."""
    config = SequenceParallelConfig.model_validate({**settings, "degree": WORLD_SIZE})
    sequence = build_sequence_parallel(config, dist.group.WORLD)
    sequence.record_length(shape.tokens)
    sequence._agreed.add("tokens")
    local = sequence.local_sizes()[0]
    q, k, v = (
        torch.zeros(shape.batch, shape.heads, local, shape.channels, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    collectives.reset()
    with no_attention():
        out, _ = sequence.attention(q, k, v)
        out.sum().backward()
    counted = sum(int(traffic["bytes"]) for traffic in collectives.snapshot().values())
    return counted, attention_bytes(config, 0, shape).total


def count_switches(shape: AttentionShape) -> tuple[int, int]:
    """Two switches of DSP, forward and backward."""
    config = SequenceParallelConfig.model_validate({"scheme": "dsp", "degree": WORLD_SIZE})
    sequence = build_sequence_parallel(config, dist.group.WORLD)
    frames, locations = shape.batch, shape.tokens
    whole = (1, frames, locations, shape.heads * shape.channels)
    sequence.record_length(locations)
    sequence._agreed.add("tokens")
    local = sequence.local_sizes()[0]
    x = torch.zeros(1, frames, local, whole[3], dtype=torch.bfloat16, requires_grad=True)
    collectives.reset()
    switched = sequence.switch(x, 2, 1, "tokens", "frames")
    sequence.switch(switched, 1, 2, "frames", "tokens").sum().backward()
    counted = sum(int(traffic["bytes"]) for traffic in collectives.snapshot().values())
    there = switch_bytes(WORLD_SIZE, 0, whole, 2, 1, 2)
    back = switch_bytes(WORLD_SIZE, 0, whole, 1, 2, 2)
    return counted, (there + back).total


def print_table() -> None:
    """A table of every model and scheme."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    print(f"| {WORLD_SIZE} ranks, bfloat16 | scheme | MB per block | formula | ratio |\n|---|---|---|---|---|")
    for model, shape in MODELS.items():
        rows = {}
        for name, settings in SETTINGS.items():
            ranks = {"ulysses": WORLD_SIZE}.get(settings["scheme"], settings.get("ulysses_degree", 1))
            rows[name] = count(settings, shape) if ranks <= shape.heads else None
        if model.startswith("STDiT3"):
            rows["dsp, a spatial and temporal pair"] = count_switches(shape)
        for name, result in rows.items():
            if result is None:
                print(f"| {model} | {name} | more ranks than its {shape.heads} heads | | |")
            else:
                counted, formula = result
                print(f"| {model} | {name} | {counted / 1e6:.1f} | {formula / 1e6:.1f} | {counted / formula:.2f} |")
    dist.destroy_process_group()
