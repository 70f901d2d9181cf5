"""Ring attention's messages and the work between them: forward and backward around the ring, and the gathered variant.

Operators without autograd; `ring` puts them together. A block is the keys and values of one rank's tokens,
(B, G, S_r, D) each; all take the tokens per rank, and this rank in the group of that name.
"""

import math
from dataclasses import dataclass

import torch

from ttv_train.ops.attention import block_attention, block_attention_backward, merge_
from ttv_train.ops.attention_kernels import AttentionBlock
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.causal import EVERYTHING, Rectangle, unflatten_runs, visible_rectangles
from ttv_train.parallel.sequence.operators import group_named, operator

PURPOSE = "ring"


@dataclass(frozen=True)
class ArrivingBlock:
    """A block on its way, and the one sent in exchange."""

    transfer: collectives.Transfer
    block: torch.Tensor

    def receive(self) -> torch.Tensor:
        self.transfer.wait()
        return self.block


class _Ring:
    """This rank's place between the previous and the next one."""

    def __init__(self, block_sizes: list[int], rank: int, group_name: str) -> None:
        self.block_sizes, self.degree = block_sizes, len(block_sizes)
        self.rank, self.group = rank, group_named(group_name)

    def pass_on(self, block: torch.Tensor, steps_back: int) -> ArrivingBlock:
        """Starts sending `block` (2, B, G, tokens, D) to the next rank and receiving, from the previous rank, the block
        of the rank `steps_back` places before this one."""
        size = self.block_sizes[(self.rank - steps_back) % self.degree]
        arriving = block.new_empty((*block.shape[:3], size, block.shape[4]))
        following, previous = (self.rank + 1) % self.degree, (self.rank - 1) % self.degree
        transfer = collectives.start_transfer([(block, following)], [(arriving, previous)], self.group, PURPOSE)
        return ArrivingBlock(transfer, arriving)


class _Sight:
    """What this rank's queries see of the block of a rank: everything, unless attention is causal."""

    def __init__(self, causal_block: int, run_bounds: list[int], run_counts: list[int], rank: int) -> None:
        self.block_length, self.rank = causal_block, rank
        self.runs = unflatten_runs(run_bounds, run_counts)

    def of(self, peer: int) -> list[Rectangle]:
        if not self.block_length:
            return [EVERYTHING]
        return visible_rectangles(self.runs[self.rank], self.runs[peer], self.block_length)


def _accumulator_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _ring_attention_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_key: torch.Tensor | None,
    text_value: torch.Tensor | None,
    text_mask: torch.Tensor | None,
    scale: float,
    block_sizes: list[int],
    causal_block: int,
    run_bounds: list[int],
    run_counts: list[int],
    rank: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], query.shape[3])).transpose(1, 2)
    return out, query.new_empty(query.shape[:3], dtype=_accumulator_dtype(query))


@operator(_ring_attention_shapes)
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_key: torch.Tensor | None,
    text_value: torch.Tensor | None,
    text_mask: torch.Tensor | None,
    scale: float,
    block_sizes: list[int],
    causal_block: int,
    run_bounds: list[int],
    run_counts: list[int],
    rank: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of local queries (B, H, Q, D) to text and all blocks: output (B, H, Q, D), log-sum-exp (B, H, Q).

    With `causal_block` above 0, queries see the blocks only as far as `causal.visible_rectangles` says; the positions
    of every rank's tokens are given by `causal.flatten_runs`.
    """
    ring = _Ring(block_sizes, rank, group_name)
    sight = _Sight(causal_block, run_bounds, run_counts, rank)
    merged: tuple[torch.Tensor, torch.Tensor] | None = None
    if causal_block:  # else the first block is where sums start
        nothing = torch.zeros_like(query, dtype=_accumulator_dtype(query))
        merged = nothing, nothing.new_full(query.shape[:3], -math.inf)

    def attend(
        key: torch.Tensor, value: torch.Tensor, parts: list[Rectangle], mask: torch.Tensor | None = None
    ) -> None:
        nonlocal merged
        if key.numel() == 0:
            return
        for part in parts:
            queries, keys = (slice(None), slice(None), part.query), (slice(None), slice(None), part.key)
            block = AttentionBlock(query[queries], key[keys], value[keys], mask, scale, causal=part.diagonal)
            out, lse = block_attention(block)
            if merged is None:
                merged = out.to(lse.dtype), lse
            else:
                merged[1][queries] = merge_(merged[0][queries], merged[1][queries], out, lse)

    block = torch.stack((key, value))
    for step in range(ring.degree):
        arriving = ring.pass_on(block, step + 1) if step + 1 < ring.degree else None
        attend(block[0], block[1], sight.of((rank - step) % ring.degree))
        if step == 0 and text_key is not None and text_value is not None:
            attend(text_key, text_value, [EVERYTHING], text_mask)
        if arriving is not None:
            block = arriving.receive()
    assert merged is not None, "a sequence has at least one token"
    # In memory tokens come before heads, as the projection that follows reads them.
    out = merged[0].to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, merged[1].contiguous()


def _ring_backward_shapes(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_key: torch.Tensor | None,
    text_value: torch.Tensor | None,
    text_mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    gradient_dtype: torch.dtype,
    block_sizes: list[int],
    causal_block: int,
    run_bounds: list[int],
    run_counts: list[int],
    rank: int,
    group_name: str,
) -> list[torch.Tensor]:
    text = [] if text_key is None else [text_key.new_empty(text_key.shape) for _ in range(2)]
    return [torch.empty_like(query), key.new_empty((2, *key.shape)), *text]


@operator(_ring_backward_shapes)
def ring_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text_key: torch.Tensor | None,
    text_value: torch.Tensor | None,
    text_mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    gradient_dtype: torch.dtype,
    block_sizes: list[int],
    causal_block: int,
    run_bounds: list[int],
    run_counts: list[int],
    rank: int,
    group_name: str,
) -> list[torch.Tensor]:
    """Gradients of the query, of the own block (2, B, G, S_r, D) from the queries of all ranks, and of the text's key
    and value if there are any. Those of blocks add up around the ring in `gradient_dtype`."""
    ring = _Ring(block_sizes, rank, group_name)
    sight = _Sight(causal_block, run_bounds, run_counts, rank)
    grad_query = torch.zeros_like(query, dtype=_accumulator_dtype(query))

    def through(
        key: torch.Tensor, value: torch.Tensor, parts: list[Rectangle], mask: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Adds to the gradient of the query what passes through these keys and returns their own gradients."""
        grads = [torch.zeros_like(x, dtype=grad_query.dtype) for x in (key, value)] if causal_block else []
        for part in parts:
            queries, keys = (slice(None), slice(None), part.query), (slice(None), slice(None), part.key)
            block = AttentionBlock(query[queries], key[keys], value[keys], mask, scale, causal=part.diagonal)
            through_query, *shares = block_attention_backward(block, grad_out[queries], out[queries], lse[queries])
            grad_query[queries].add_(through_query)
            if not grads:
                grads = shares
            else:
                for grad, share in zip(grads, shares, strict=True):
                    grad[keys].add_(share)
        return grads

    own = torch.stack((key, value))
    arriving = ring.pass_on(own, 1) if ring.degree > 1 else None
    grad_text: list[torch.Tensor] = []
    if text_key is not None and text_value is not None:
        grad_text = through(text_key, text_value, [EVERYTHING], text_mask)
    arriving_total: ArrivingBlock | None = None
    for step in range(1, ring.degree + 1):
        # The blocks of the ranks before this one, nearest first; this rank's own last.
        block = own if arriving is None else arriving.receive()
        arriving = ring.pass_on(block, step + 1) if step + 1 < ring.degree else None
        grads = through(block[0], block[1], sight.of((rank - step) % ring.degree))
        total = torch.stack(grads).to(gradient_dtype)
        if arriving_total is not None:
            total += arriving_total.receive()
        arriving_total = ring.pass_on(total, step + 1) if step < ring.degree else None
    return [grad_query.to(query.dtype), total.to(key.dtype), *(grad.contiguous() for grad in grad_text)]


def _gather_blocks_shape(
    key: torch.Tensor, value: torch.Tensor, text: list[torch.Tensor], block_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    tokens = sum(block_sizes) + (text[0].shape[2] if text else 0)
    return key.new_empty((tokens, key.shape[0], 2 * key.shape[1], key.shape[3]))


@operator(_gather_blocks_shape)
def gather_blocks(
    key: torch.Tensor, value: torch.Tensor, text: list[torch.Tensor], block_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    """All keys and values behind those of the text, token-first: (L + S, B, key and value heads, D)."""
    rows = torch.cat((key, value), dim=1).permute(2, 0, 1, 3).contiguous()
    text_length = text[0].shape[2] if text else 0
    joint = rows.new_empty((text_length + sum(block_sizes), *rows.shape[1:]))
    transfer = collectives.all_gather_rows(joint[text_length:], rows, block_sizes, group_named(group_name), PURPOSE)
    if text:
        joint[:text_length] = torch.cat(text, dim=1).permute(2, 0, 1, 3)
    transfer.wait()
    return joint


def _gather_backward_shape(
    grad_key: torch.Tensor, grad_value: torch.Tensor, block_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    return grad_key.new_empty((block_sizes[rank], grad_key.shape[0], 2 * grad_key.shape[1], grad_key.shape[3]))


@operator(_gather_backward_shape)
def gather_blocks_backward(
    grad_key: torch.Tensor, grad_value: torch.Tensor, block_sizes: list[int], rank: int, group_name: str
) -> torch.Tensor:
    """This rank's gradients of all keys and values, (B, G, S, D) each, to those of its block from all ranks,
    token-first: (S_r, B, key and value heads, D). gloo's reduce-scatter sends twice as much as this exchange."""
    send = torch.cat((grad_key, grad_value), dim=1).permute(2, 0, 1, 3).contiguous()
    received = send.new_empty((len(block_sizes), block_sizes[rank], *send.shape[1:]))
    arriving, leaving = ([piece.numel() for piece in pieces] for pieces in (received, send.split(block_sizes)))
    collectives.all_to_all(received, send, arriving, leaving, group_named(group_name), PURPOSE)
    return received.sum(0, dtype=_accumulator_dtype(send)).to(send.dtype)
