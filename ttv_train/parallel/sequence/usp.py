"""Unified sequence parallelism: Ulysses inside, ring attention outside (USP, arXiv 2405.07719).

The N = U x R ranks of a group form a mesh of R rows of U consecutive ranks. Ranks of a row exchange tokens for heads,
ranks of a column pass key/value blocks of their heads around, so that the many bytes of the ring's M / N stay few and
Ulysses' all-to-all stays within a node. A rank sends 8 (M / N) (U-1) / U + 6 (M / N) (R-1) per attention, forward and
backward. A row holds a contiguous part of the sequence, shared out among its ranks.

Text is treated as by both: a rank takes its heads of it and attends with them to all blocks of the ring; the output
comes back with the row's last exchange, 2 M_t (U-1) / U.
"""

from itertools import chain

import torch
import torch.distributed as dist

from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.causal import Runs, balanced_runs, contiguous_runs, divide_runs, num_tokens
from ttv_train.parallel.sequence.ring import RingExchange, RingMode
from ttv_train.parallel.sequence.ulysses import HeadExchange


class UnifiedSequenceParallel(SequenceParallel):
    """Ulysses of degree `ulysses_degree` times ring attention over the rest of `group`.

    All ranks of `group` construct it together, since it forms their subgroups.

    Args:
        ulysses_degree: divides the size of `group`.
        mode, gradient_dtype, balanced: of the ring, as in `RingSequenceParallel`.

    Raises:
        ValueError: `ulysses_degree` does not divide the size of `group`.
    """

    scheme = "usp"

    def __init__(
        self,
        group: dist.ProcessGroup,
        ulysses_degree: int,
        mode: RingMode = "auto",
        gradient_dtype: torch.dtype | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__(group)
        if self.degree % ulysses_degree:
            raise ValueError(f"ulysses degree {ulysses_degree} does not divide {self.degree} ranks")
        self.ulysses_degree = ulysses_degree
        self.ring_rank, self.ulysses_rank = divmod(self.rank, ulysses_degree)
        self.mode: RingMode = mode
        self.gradient_dtype = gradient_dtype
        self.balanced = balanced
        ranks = dist.get_process_group_ranks(group)
        row = ranks[self.ring_rank * ulysses_degree : (self.ring_rank + 1) * ulysses_degree]
        column = ranks[self.ulysses_rank :: ulysses_degree]
        # Only the members of a group take part in making it. Rows come first on every rank, so none waits crosswise.
        self.ulysses_group = dist.new_group(row, use_local_synchronization=True)
        self.ring_group = dist.new_group(column, use_local_synchronization=True)

    def runs(self, length: int) -> list[Runs]:
        if not self.balanced:
            return contiguous_runs(length, self.degree)
        rows = balanced_runs(length, self.degree // self.ulysses_degree)
        return [part for row in rows for part in divide_runs(row, self.ulysses_degree)]

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text: TextTensors | None,
        text_mask: torch.Tensor | None,
        scale: float | None,
        causal_block: int | None,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        runs, width = self.runs(self.length(name)), self.ulysses_degree
        rows = [runs[start : start + width] for start in range(0, self.degree, width)]
        sizes = [num_tokens(part) for part in rows[self.ring_rank]]
        exchange = HeadExchange(self.ulysses_group.group_name, self.ulysses_rank, sizes, query.shape[1], key.shape[1])
        ring = RingExchange(
            self.ring_group.group_name,
            self.ring_rank,
            [list(chain.from_iterable(row)) for row in rows],
            causal_block,
            self.mode,
            self.gradient_dtype,
        )
        scale = query.shape[3] ** -0.5 if scale is None else scale

        query, key, value = exchange.to_heads(query, key, value, text)
        text_key = text_value = None
        if text is not None:
            lengths = [text[0].shape[2], exchange.num_tokens]
            text_key, key = key.split(lengths, dim=2)
            text_value, value = value.split(lengths, dim=2)
        out = ring.attention(query, key, value, text_key, text_value, text_mask, scale)
        return exchange.to_tokens(out, text)
