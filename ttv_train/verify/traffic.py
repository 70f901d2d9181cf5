"""Counts what a step sends, and by the formulas what its attention layers should have sent."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.traffic import AttentionShape, Bytes, attention_bytes, switch_bytes

EXCHANGES = ("ulysses", "ring", "dsp")
"""Purposes of collectives that belong to attention; others check shapes or join outputs."""


@dataclass
class TrafficRecord:
    """Exchanges of one step in which backward recomputes every block: each call is seen twice in forward, and has one
    backward."""

    config: SequenceParallelConfig
    sequence: SequenceParallel
    calls: int = 0
    expected: Bytes = field(default_factory=lambda: Bytes(0, 0))
    counted: float = 0

    def per_block(self) -> tuple[float, float]:
        """Bytes that this rank sent for one attention block, with its recomputation: counted and by the formula. Under
        dsp a block is a pair of a spatial and a temporal one, which switches twice."""
        blocks = self.calls / 2 / (2 if self.config.scheme == "dsp" else 1)
        if not blocks:
            return 0.0, 0.0
        return self.counted / blocks, (self.expected.forward + self.expected.backward / 2) / blocks

    def add(self, expected: Bytes) -> None:
        """One call."""
        self.calls += 1
        self.expected += expected

    def see_attention(self, query: torch.Tensor, key: torch.Tensor, text: TextTensors | None, name: str) -> None:
        """A call of `SequenceParallel.attention`."""
        if not self.sequence.attention_exchanges:
            return
        batch, heads, _, channels = query.shape
        shape = AttentionShape(
            batch,
            self.sequence.length(name),
            heads,
            key.shape[1],
            channels,
            query.element_size(),
            0 if text is None else text[0].shape[2],
        )
        self.add(attention_bytes(self.config, self.sequence.rank, shape))

    def see_switch(self, x: torch.Tensor, from_dim: int, to_dim: int, from_name: str) -> None:
        """A call of `SequenceParallel.switch`."""
        if self.config.scheme != "dsp":
            return
        shape = list(x.shape)
        shape[from_dim] = self.sequence.length(from_name)
        sequence = self.sequence
        self.add(switch_bytes(sequence.degree, sequence.rank, shape, from_dim, to_dim, x.element_size()))


@contextmanager
def recorded(config: SequenceParallelConfig, sequence: SequenceParallel) -> Iterator[TrafficRecord]:
    """Within it the exchanges of `sequence`, which is built from `config`, are recorded."""
    record = TrafficRecord(config, sequence)
    attention, switch = sequence.attention, sequence.switch

    def recorded_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, text: TextTensors | None = None, **options: Any
    ) -> Any:
        record.see_attention(query, key, text, options.get("name", "tokens"))
        return attention(query, key, value, text=text, **options)

    def recorded_switch(
        x: torch.Tensor, from_dim: int, to_dim: int, from_name: str = "tokens", to_name: str = "space"
    ) -> torch.Tensor:
        record.see_switch(x, from_dim, to_dim, from_name)
        return switch(x, from_dim, to_dim, from_name, to_name)

    collectives.reset()
    with ExitStack() as stack:
        stack.enter_context(replaced(sequence, "attention", recorded_attention))
        stack.enter_context(replaced(sequence, "switch", recorded_switch))
        yield record
    traffic = collectives.snapshot()
    record.counted = sum(counts["bytes"] for purpose, counts in traffic.items() if purpose in EXCHANGES)


@contextmanager
def replaced(instance: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it `function` stands for a method of `instance`."""
    previous = vars(instance).get(name)
    setattr(instance, name, function)
    try:
        yield
    finally:
        if previous is None:
            delattr(instance, name)
        else:
            setattr(instance, name, previous)
