"""Ring attention: key/value blocks travel, queries stay (Ring Attention, arXiv 2310.01889).

Each rank attends with its own queries to one key/value block after the other while the next block is on its way, and
merges the results by their log-sum-exp. In backward the same blocks travel again, and the gradient of each block
travels behind it, collecting every rank's share. A block's own rank adds its share last, when the gradient comes home,
so that a gradient makes N-1 hops and not N. With M the bytes of one hidden tensor (B, S, H, D) and N ranks, a rank
sends 2 M (N-1) / N forward and 4 M (N-1) / N backward; gradients that travel in float32 for half-precision inputs
weigh twice, which makes 8 M (N-1) / N in all.

Where the sequence is short or key/value heads are few, transfers cannot hide behind compute and bytes decide: mode
`gather` gathers all keys and values at once, 2 M (N-1) / N, and sends each rank the gradients of its block, as much
again, for key/value memory that does not shrink with N.

Text. Its keys and values are on every rank and are one more block there. Its queries attend on every rank to all blocks
as they come by, in front of the local video queries: the text output is whole on every rank, and no text is ever sent,
forward or backward. The price is compute: every rank repeats the text queries, N L / (S + L) of the attention. Dealing
them to the ranks instead would cost 2 M_t (N-1) / N bytes and two more collectives per layer, and merging partial
results over local blocks 4 M_t (N-1) / N, M_t being the bytes of one text tensor (B, L, H, D). Text is short where ring
attention pays, so nothing is sent. Replicas of the text merge blocks in different orders and agree to rounding.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ttv_train.ops.attention import attention, block_attention, block_attention_backward, joint_key_mask, merge_
from ttv_train.ops.attention_kernels import AttentionBlock
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors

PURPOSE = "ring"


@dataclass(frozen=True)
class RingExchange:
    """The blocks of `group` and how they get from rank to rank."""

    group: dist.ProcessGroup
    rank: int
    block_sizes: tuple[int, ...]
    mode: Literal["rotate", "gather"]
    gradient_dtype: torch.dtype | None
    """In which key/value gradients travel in mode `rotate`; `None` is float32, or float64 for float64."""

    def pass_on(self, block: torch.Tensor, steps_back: int) -> "ArrivingBlock":
        """Starts sending `block` (2, B, G, tokens, D) to the next rank and receiving, from the previous rank, the block
        of the rank `steps_back` places before this one."""
        degree = len(self.block_sizes)
        size = self.block_sizes[(self.rank - steps_back) % degree]
        arriving = block.new_empty((*block.shape[:3], size, block.shape[4]))
        transfer = collectives.start_transfer(
            [(block, (self.rank + 1) % degree)], [(arriving, (self.rank - 1) % degree)], self.group, PURPOSE
        )
        return ArrivingBlock(transfer, arriving)

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
        if self.mode == "rotate":
            return _RingAttention.apply(self, query, key, value, text_key, text_value, text_mask, scale)
        text = () if text_key is None else (text_key, text_value)
        key, value = _GatherBlocks.apply(self, key, value, *text)
        return attention(query, key, value, key_mask=joint_key_mask(text_mask, sum(self.block_sizes)), scale=scale)


@dataclass(frozen=True)
class ArrivingBlock:
    """A block on its way, and the one sent in exchange."""

    transfer: collectives.Transfer
    block: torch.Tensor

    def receive(self) -> torch.Tensor:
        self.transfer.wait()
        return self.block


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
        degree = len(ring.block_sizes)
        merged: tuple[torch.Tensor, torch.Tensor] | None = None

        def attend(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
            nonlocal merged
            if key.numel() == 0:
                return
            out, lse = block_attention(AttentionBlock(query, key, value, mask, scale))
            merged = (out.to(lse.dtype), lse) if merged is None else (merged[0], merge_(*merged, out, lse))

        own = block = torch.stack((key, value))
        for step in range(degree):
            arriving = ring.pass_on(block, step + 1) if step + 1 < degree else None
            attend(*block)
            if step == 0 and text_key is not None and text_value is not None:
                attend(text_key, text_value, text_mask)
            if arriving is not None:
                block = arriving.receive()
        assert merged is not None, "a sequence has at least one token"
        out, lse = merged[0].to(query.dtype), merged[1]
        ctx.save_for_backward(query, own, text_key, text_value, text_mask, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, own, text_key, text_value, text_mask, out, lse = ctx.saved_tensors
        ring: RingExchange = ctx.ring
        degree, accumulate = len(ring.block_sizes), torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query, dtype=accumulate)

        def through(
            key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Adds to the gradient of the query what passes through these keys and returns their own gradients."""
            block = AttentionBlock(query, key, value, mask, ctx.scale)
            through_query, grad_key, grad_value = block_attention_backward(block, grads[0], out, lse)
            grad_query.add_(through_query)
            return grad_key, grad_value

        arriving = ring.pass_on(own, 1) if degree > 1 else None
        grad_text = (None, None) if text_key is None else through(text_key, text_value, text_mask)
        arriving_total: ArrivingBlock | None = None
        for step in range(1, degree + 1):
            # The blocks of the ranks before this one, nearest first; this rank's own last.
            block = own if arriving is None else arriving.receive()
            arriving = ring.pass_on(block, step + 1) if step + 1 < degree else None
            total = torch.stack(through(*block)).to(ring.gradient_dtype or accumulate)
            if arriving_total is not None:
                total += arriving_total.receive()
            arriving_total = ring.pass_on(total, step + 1) if step < degree else None
        grad_key, grad_value = total.to(own.dtype)
        return None, grad_query.to(query.dtype), grad_key, grad_value, *grad_text, None, None


class _GatherBlocks(torch.autograd.Function):
    """All keys and values, behind those of the text, as views of one token-first buffer; in backward every rank gets
    the gradients of its block and sums them."""

    @staticmethod
    def forward(
        ctx: Any, ring: RingExchange, key: torch.Tensor, value: torch.Tensor, *text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ring, ctx.text_length = ring, text[0].shape[2] if text else 0
        rows = torch.cat((key, value), dim=1).permute(2, 0, 1, 3).contiguous()
        joint = rows.new_empty((ctx.text_length + sum(ring.block_sizes), *rows.shape[1:]))
        transfer = collectives.all_gather_rows(joint[ctx.text_length :], rows, ring.block_sizes, ring.group, PURPOSE)
        if text:
            joint[: ctx.text_length] = torch.cat(text, dim=1).permute(2, 0, 1, 3)
        transfer.wait()
        joint_key, joint_value = joint.permute(1, 2, 0, 3).chunk(2, dim=1)
        return joint_key, joint_value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ring, text_length = ctx.ring, ctx.text_length
        both = torch.cat(grads, dim=1)
        send = both[:, :, text_length:].permute(2, 0, 1, 3).contiguous()
        received = send.new_empty((len(ring.block_sizes), ring.block_sizes[ring.rank], *send.shape[1:]))
        row = send[0].numel()
        collectives.all_to_all(
            received,
            send,
            [received[0].numel()] * len(received),
            [size * row for size in ring.block_sizes],
            ring.group,
            PURPOSE,
        )
        total = received.sum(0, dtype=torch.promote_types(send.dtype, torch.float32)).to(send.dtype)
        video = total.permute(1, 2, 0, 3).chunk(2, dim=1)
        text = both[:, :, :text_length].chunk(2, dim=1) if text_length else ()
        return None, *video, *text


class RingSequenceParallel(SequenceParallel):
    """Key/value blocks around a ring, or gathered.

    Args:
        mode: `rotate` for long sequences, `gather` for short ones or few key/value heads.
        gradient_dtype: in which key/value gradients travel in mode `rotate`; `None` is at least float32.
    """

    scheme = "ring"

    def __init__(
        self,
        group: dist.ProcessGroup,
        mode: Literal["rotate", "gather"] = "rotate",
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.mode: Literal["rotate", "gather"] = mode
        self.gradient_dtype = gradient_dtype

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text: TextTensors | None,
        text_mask: torch.Tensor | None,
        scale: float | None,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.group is not None
        ring = RingExchange(self.group, self.rank, tuple(self.local_sizes(name)), self.mode, self.gradient_dtype)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if text is None:
            return ring.attention(query, key, value, None, None, None, scale), None
        joint_query = torch.cat((text[0], query), dim=2)
        out = ring.attention(joint_query, key, value, text[1], text[2], text_mask, scale)
        text_out, video_out = out.split([text[0].shape[2], query.shape[2]], dim=2)
        return video_out, text_out
