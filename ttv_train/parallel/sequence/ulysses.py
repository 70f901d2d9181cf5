"""Ulysses: all-to-all between tokens and heads around a plain local attention (DeepSpeed-Ulysses, arXiv 2309.14509).

Before attention a rank holds S_r tokens and all heads; after the exchange it holds all tokens and h_r heads. Query, key
and value travel in one all-to-all, the output in another; backward mirrors them. With M the bytes of one hidden tensor
(B, S, H, D), N ranks and everything divisible, a rank sends 8 M (N-1) / N^2 per attention, forward and backward.

Text. Every rank takes the text heads it computes from its own copy, so text queries, keys and values are not sent. The
text output must become whole everywhere: each rank adds its heads of it to the message that takes the video output back
to its tokens, and in backward the rank that computed a head sums the gradients that come back from all copies. With M_t
the bytes of one text tensor (B, L, H, D) that is 2 M_t (N-1) / N, the least that leaves the output on every rank.

Layout. Messages are token-first, (tokens, B, heads, D), so that what arrives from rank 0, 1, ... is the joint sequence
as it stands: one allocation receives the video behind the text, and attention reads query, key and value as views of
it, without a copy or a concatenation.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ttv_train.ops.attention import attention, block_causal_attention, joint_key_mask
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.head_messages import (
    head_first,
    heads_to_tokens,
    heads_to_tokens_backward,
    tokens_to_heads,
    tokens_to_heads_backward,
)
from ttv_train.parallel.sequence.shapes import HeadSplit, split_heads


@dataclass(frozen=True)
class HeadExchange:
    """Who holds which tokens and computes which heads within a group."""

    group_name: str
    rank: int
    token_sizes: list[int]
    num_query_heads: int
    num_key_heads: int

    @property
    def num_tokens(self) -> int:
        return sum(self.token_sizes)

    @property
    def heads(self) -> HeadSplit:
        return split_heads(self.num_query_heads, self.num_key_heads, len(self.token_sizes))

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, text: TextTensors | None
    ) -> TextTensors:
        """Local tokens with all heads to all tokens with local heads, text in front: (B, h, L + S, D) each, with the
        key/value heads repeated where a rank's heads do not form whole groups."""
        query, key, value = _TokensToHeads.apply(self, query, key, value, *(text or ()))
        groups = self.heads.key_head_of(self.rank)
        size, rest = divmod(len(groups), key.shape[1])
        if rest or groups != [head // size for head in range(len(groups))]:
            key, value = key[:, groups], value[:, groups]
        return query, key, value

    def to_tokens(self, out: torch.Tensor, text: TextTensors | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output (B, h, L + S, D) of local heads to all heads of the local tokens and of the text."""
        video_out, text_out = _HeadsToTokens.apply(self, out, 0 if text is None else text[0].shape[2])
        return video_out, None if text is None else text_out


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor) -> TextTensors:
        video, text = tensors[:3], tensors[3:]
        ctx.exchange, ctx.text_length = exchange, text[0].shape[2] if text else None
        joint = tokens_to_heads(*video, text, exchange.token_sizes, exchange.rank, exchange.group_name)
        num_query, num_key = exchange.heads.num_query(exchange.rank), exchange.heads.num_key(exchange.rank)
        query, key, value = head_first(joint).split([num_query, num_key, num_key], dim=1)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange: HeadExchange = ctx.exchange
        video = tokens_to_heads_backward(
            *grads,
            ctx.text_length or 0,
            exchange.token_sizes,
            exchange.num_query_heads,
            exchange.num_key_heads,
            exchange.rank,
            exchange.group_name,
        )
        text = []
        if ctx.text_length is not None:
            # A rank took its own heads of the text; its copy has no gradient at the others.
            for grad, whole, part in zip(grads, video, exchange.heads.of(exchange.rank), strict=True):
                text.append(grad.new_zeros((*whole.shape[:2], ctx.text_length, whole.shape[3])))
                text[-1][:, part] = grad[:, :, : ctx.text_length]
        return None, *video, *text


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, out: torch.Tensor, text_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        video_out, text_out = heads_to_tokens(
            out,
            text_length,
            exchange.token_sizes,
            exchange.num_query_heads,
            exchange.num_key_heads,
            exchange.rank,
            exchange.group_name,
        )
        return video_out, text_out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange: HeadExchange = ctx.exchange
        grad = heads_to_tokens_backward(
            *grads,
            exchange.token_sizes,
            exchange.num_query_heads,
            exchange.num_key_heads,
            exchange.rank,
            exchange.group_name,
        )
        return None, head_first(grad), None


class UlyssesSequenceParallel(SequenceParallel):
    """All-to-all between tokens and heads."""

    scheme = "ulysses"

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
        exchange = HeadExchange(self.group.group_name, self.rank, self.local_sizes(name), query.shape[1], key.shape[1])
        query, key, value = exchange.to_heads(query, key, value, text)
        if causal_block is not None:
            out = block_causal_attention(query, key, value, causal_block, scale)
        else:
            mask = joint_key_mask(text_mask, exchange.num_tokens)
            out = attention(query, key, value, key_mask=mask, scale=scale)
        return exchange.to_tokens(out, text)
