"""Ring attention: key/value blocks travel, queries stay (Ring Attention, arXiv 2310.01889).

Each rank attends with its own queries to one key/value block after the other while the next block is on its way, and
merges the results by their log-sum-exp. In backward the same blocks travel again, and the gradient of each block
travels behind it, collecting every rank's share. A block's own rank adds its share last, when the gradient comes home,
so that a gradient makes N-1 hops and not N. With M the bytes of one hidden tensor (B, S, H, D) and N ranks, a rank
sends 2 M (N-1) / N forward and 4 M (N-1) / N backward; gradients that travel in float32 for half-precision inputs
weigh twice, which makes 8 M (N-1) / N in all.

Where the sequence is short or key/value heads are few, transfers cannot hide behind compute and bytes decide:
mode `gather` takes all keys and values at once, 2 M (N-1) / N, and sends each rank the gradients of its block, as
much again, for key/value memory that does not shrink with N.

Text. Its keys and values are on every rank and are one more block there. Its queries attend on every rank to all blocks
as they come by, in front of the local video queries: the text output is whole on every rank, and no text is ever sent,
forward or backward. The price is compute: every rank repeats the text queries, N L / (S + L) of the attention. Dealing
them to the ranks instead would cost 2 M_t (N-1) / N bytes and two more collectives per layer, and merging partial
results over local blocks 4 M_t (N-1) / N, M_t being the bytes of one text tensor (B, L, H, D). Text is short where ring
attention pays, so nothing is sent. Replicas of the text merge blocks in different orders and agree to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ttv_train.ops.attention import attention, joint_key_mask
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.block_messages import (
    gather_blocks,
    gather_blocks_backward,
    ring_attention,
    ring_attention_backward,
)
from ttv_train.parallel.sequence.causal import Runs, balanced_runs, contiguous_runs, flatten_runs, num_tokens

RingMode = Literal["auto", "rotate", "gather"]
HIDING_TOKENS = 2048
"""With fewer tokens per rank a block's transfer takes longer than the attention that should hide it, on NVLink: the
compute per byte grows with the tokens of a rank, and breaks even at about 1600."""


def gathers(mode: RingMode, block_sizes: Sequence[int], num_query_heads: int, num_key_heads: int) -> bool:
    """Whether keys and values are gathered at once; `auto` decides by the length and the heads."""
    if mode == "auto":
        few_heads = num_key_heads * len(block_sizes) <= num_query_heads
        return few_heads or max(block_sizes) < HIDING_TOKENS
    return mode == "gather"


@dataclass(frozen=True)
class RingExchange:
    """The blocks of a group and how they get from rank to rank."""

    group_name: str
    rank: int
    runs: list[Runs]
    """The positions that each rank holds."""
    causal_block: int | None
    mode: RingMode
    gradient_dtype: torch.dtype | None
    """In which key/value gradients travel in mode `rotate`; `None` is float32, or float64 for float64."""

    @property
    def block_sizes(self) -> list[int]:
        return [num_tokens(runs) for runs in self.runs]

    @property
    def causal_arguments(self) -> tuple[int, list[int], list[int]]:
        """What the operators take: the length of a causal block, 0 for none, and the runs as numbers."""
        if self.causal_block is None:
            return 0, [], []
        return self.causal_block, *flatten_runs(self.runs)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text_key: torch.Tensor | None,
        text_value: torch.Tensor | None,
        text_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention of local queries (B, H, Q, D) to text keys (B, G, L, D) and the blocks (B, G, S_r, D) of all
        ranks."""
        gathered = gathers(self.mode, self.block_sizes, query.shape[1], key.shape[1])
        if self.causal_block is not None or not gathered:
            out: torch.Tensor = _RingAttention.apply(self, query, key, value, text_key, text_value, text_mask, scale)
            return out
        text = () if text_key is None else (text_key, text_value)
        key, value = _GatherBlocks.apply(self, key, value, *text)
        return attention(query, key, value, key_mask=joint_key_mask(text_mask, sum(self.block_sizes)), scale=scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: RingExchange,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text_key: torch.Tensor | None,
        text_value: torch.Tensor | None,
        text_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        inputs = query, key, value, text_key, text_value, text_mask
        out, lse = ring_attention(*inputs, scale, ring.block_sizes, *ring.causal_arguments, ring.rank, ring.group_name)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ring: RingExchange = ctx.ring
        dtype = ring.gradient_dtype or torch.promote_types(grads[0].dtype, torch.float32)
        grad_query, grad_block, *grad_text = ring_attention_backward(
            grads[0],
            *ctx.saved_tensors,
            ctx.scale,
            dtype,
            ring.block_sizes,
            *ring.causal_arguments,
            ring.rank,
            ring.group_name,
        )
        return None, grad_query, *grad_block.unbind(), *(grad_text or (None, None)), None, None


class _GatherBlocks(torch.autograd.Function):
    """All keys and values, behind those of the text, as views of one buffer; in backward every rank gets the gradients
    of its block and sums them."""

    @staticmethod
    def forward(
        ctx: Any, ring: RingExchange, key: torch.Tensor, value: torch.Tensor, *text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ring, ctx.text_length = ring, text[0].shape[2] if text else None
        joint = gather_blocks(key, value, text, ring.block_sizes, ring.rank, ring.group_name)
        joint_key, joint_value = joint.permute(1, 2, 0, 3).chunk(2, dim=1)
        return joint_key, joint_value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ring, has_text, text_length = ctx.ring, ctx.text_length is not None, ctx.text_length or 0
        block = gather_blocks_backward(
            *(grad[:, :, text_length:] for grad in grads), ring.block_sizes, ring.rank, ring.group_name
        )
        text = [grad[:, :, :text_length] for grad in grads] if has_text else []
        return None, *block.permute(1, 2, 0, 3).chunk(2, dim=1), *text


class RingSequenceParallel(SequenceParallel):
    """Key/value blocks around a ring, or gathered.

    Args:
        mode: `rotate` for long sequences, `gather` for short ones or few key/value heads, `auto` to choose by the
            shape. Causal attention rotates, since it skips the blocks that it does not see.
        gradient_dtype: in which key/value gradients travel in mode `rotate`; `None` is at least float32.
        balanced: hold tokens so that causal attention is the same work for every rank; see
            `ttv_train.parallel.sequence.causal`.
    """

    scheme = "ring"

    def __init__(
        self,
        group: dist.ProcessGroup,
        mode: RingMode = "auto",
        gradient_dtype: torch.dtype | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__(group)
        self.mode: RingMode = mode
        self.gradient_dtype = gradient_dtype
        self.balanced = balanced

    def runs(self, length: int) -> list[Runs]:
        return (balanced_runs if self.balanced else contiguous_runs)(length, self.degree)

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
        assert self.group is not None
        runs = self.runs(self.length(name))
        ring = RingExchange(self.group.group_name, self.rank, runs, causal_block, self.mode, self.gradient_dtype)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if text is None:
            return ring.attention(query, key, value, None, None, None, scale), None
        joint_query = torch.cat((text[0], query), dim=2)
        out = ring.attention(joint_query, key, value, text[1], text[2], text_mask, scale)
        text_out, video_out = out.split([text[0].shape[2], query.shape[2]], dim=2)
        return video_out, text_out
