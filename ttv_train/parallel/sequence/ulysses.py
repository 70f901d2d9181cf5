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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.ops.attention import attention, joint_key_mask
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors
from ttv_train.parallel.sequence.shapes import HeadSplit, allocate_pieces, split_heads

PURPOSE = "ulysses"


@dataclass(frozen=True)
class HeadExchange:
    """Who holds which tokens and computes which heads within `group`."""

    group: dist.ProcessGroup
    rank: int
    token_sizes: tuple[int, ...]
    heads: HeadSplit

    @property
    def num_tokens(self) -> int:
        return sum(self.token_sizes)

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

    def to_tokens(self, out: torch.Tensor, text_length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output (B, h, L + S, D) of local heads to all heads of the local tokens and of the text."""
        video_out, text_out = _HeadsToTokens.apply(self, out, text_length)
        return video_out, text_out if text_length else None


def _token_first(x: torch.Tensor) -> torch.Tensor:
    """(B, heads, tokens, D) viewed as (tokens, B, heads, D), or back."""
    return x.permute(2, 0, 1, 3)


def _head_first(x: torch.Tensor) -> torch.Tensor:
    """(tokens, B, heads, D) viewed as (B, heads, tokens, D)."""
    return x.permute(1, 2, 0, 3)


def _empty_heads(like: torch.Tensor, batch: int, heads: int, tokens: int, channels: int) -> torch.Tensor:
    """An empty (B, heads, tokens, D) that lies in memory as (B, tokens, heads, D), as projections write and read it."""
    return like.new_empty((batch, tokens, heads, channels)).transpose(1, 2)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        video, text = tensors[:3], tensors[3:]
        heads, rank, sizes = exchange.heads, exchange.rank, exchange.token_sizes
        batch, _, local, channels = video[0].shape
        text_length = text[0].shape[2] if text else 0
        ctx.exchange, ctx.text_length = exchange, text_length

        # Piece j: (S_r, B, query heads of j + key heads of j + value heads of j, D).
        shapes = [
            (local, batch, heads.num_query(peer) + 2 * heads.num_key(peer), channels) for peer in range(len(sizes))
        ]
        send, pieces = allocate_pieces(video[0], shapes)
        for peer, piece in enumerate(pieces):
            slices = (heads.query[peer], heads.key[peer], heads.key[peer])
            _fill(piece, [_token_first(x[:, part]) for x, part in zip(video, slices, strict=True)])

        width = shapes[rank][2]
        joint = send.new_empty((text_length + exchange.num_tokens, batch, width, channels))
        row = batch * width * channels
        collectives.all_to_all(
            joint[text_length:],
            send,
            [size * row for size in sizes],
            [p.numel() for p in pieces],
            exchange.group,
            PURPOSE,
        )
        if text:
            slices = (heads.query[rank], heads.key[rank], heads.key[rank])
            _fill(joint[:text_length], [_token_first(x[:, part]) for x, part in zip(text, slices, strict=True)])
        num_query, num_key = heads.num_query(rank), heads.num_key(rank)
        query, key, value = _head_first(joint).split([num_query, num_key, num_key], dim=1)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange, text_length = ctx.exchange, ctx.text_length
        heads, rank, sizes = exchange.heads, exchange.rank, exchange.token_sizes
        batch, _, _, channels = grads[0].shape
        width = heads.num_query(rank) + 2 * heads.num_key(rank)

        send = grads[0].new_empty((exchange.num_tokens, batch, width, channels))
        _fill(send, [_token_first(grad[:, :, text_length:]) for grad in grads])
        shapes = [
            (sizes[rank], batch, heads.num_query(peer) + 2 * heads.num_key(peer), channels)
            for peer in range(len(sizes))
        ]
        received, pieces = allocate_pieces(send, shapes)
        row = batch * width * channels
        collectives.all_to_all(
            received, send, [p.numel() for p in pieces], [size * row for size in sizes], exchange.group, PURPOSE
        )
        del send

        totals = (heads.num_query_heads, heads.num_key_heads, heads.num_key_heads)
        video = [_empty_heads(received, batch, total, sizes[rank], channels) for total in totals]
        if heads.shares_key_heads:
            for grad in video[1:]:
                grad.zero_()
        for peer, piece in enumerate(pieces):
            num_query, num_key = heads.num_query(peer), heads.num_key(peer)
            query, key, value = _head_first(piece).split([num_query, num_key, num_key], dim=1)
            video[0][:, heads.query[peer]] = query
            for grad, part in zip(video[1:], (key, value), strict=True):
                if heads.shares_key_heads:
                    grad[:, heads.key[peer]] += part
                else:
                    grad[:, heads.key[peer]] = part
        text = []
        if text_length:
            slices = (heads.query[rank], heads.key[rank], heads.key[rank])
            for grad, total, part in zip(grads, totals, slices, strict=True):
                whole = grad.new_zeros((batch, total, text_length, channels))
                whole[:, part] = grad[:, :, :text_length]
                text.append(whole)
        return None, *video, *text


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, out: torch.Tensor, text_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, rank, sizes = exchange.heads, exchange.rank, exchange.token_sizes
        batch, width, _, channels = out.shape
        ctx.exchange, ctx.text_length = exchange, text_length
        text_out, *video_out = _token_first(out).split([text_length, *sizes])

        # Piece j: (L + S_j, B, own heads, D). The text goes to everyone.
        send_shapes = [(text_length + size, batch, width, channels) for size in sizes]
        if text_length:
            send, pieces = allocate_pieces(out, send_shapes)
            for piece, part in zip(pieces, video_out, strict=True):
                torch.cat((text_out, part), out=piece)
        else:
            send = _token_first(out).contiguous()
        shapes = [(text_length + sizes[rank], batch, heads.num_query(peer), channels) for peer in range(len(sizes))]
        received, pieces = allocate_pieces(out, shapes)
        collectives.all_to_all(
            received,
            send,
            [p.numel() for p in pieces],
            [math.prod(shape) for shape in send_shapes],
            exchange.group,
            PURPOSE,
        )
        total = heads.num_query_heads
        text, video = (_empty_heads(out, batch, total, tokens, channels) for tokens in (text_length, sizes[rank]))
        for peer, piece in enumerate(pieces):
            of_text, of_video = _head_first(piece).split([text_length, sizes[rank]], dim=2)
            text[:, heads.query[peer]] = of_text
            video[:, heads.query[peer]] = of_video
        return video, text

    @staticmethod
    def backward(ctx: Any, grad_video: torch.Tensor, grad_text: torch.Tensor) -> tuple[Any, ...]:
        exchange, text_length = ctx.exchange, ctx.text_length
        heads, rank, sizes = exchange.heads, exchange.rank, exchange.token_sizes
        batch, _, local, channels = grad_video.shape

        shapes = [(text_length + local, batch, heads.num_query(peer), channels) for peer in range(len(sizes))]
        send, pieces = allocate_pieces(grad_video, shapes)
        for peer, piece in enumerate(pieces):
            piece[:text_length] = _token_first(grad_text[:, heads.query[peer]])
            piece[text_length:] = _token_first(grad_video[:, heads.query[peer]])
        width = heads.num_query(rank)
        shapes = [(text_length + size, batch, width, channels) for size in sizes]
        received, arrived = allocate_pieces(grad_video, shapes)
        collectives.all_to_all(
            received, send, [p.numel() for p in arrived], [p.numel() for p in pieces], exchange.group, PURPOSE
        )
        if not text_length:
            return None, _head_first(received.view(-1, batch, width, channels)), None
        del send, pieces
        grad = received.new_empty((text_length + exchange.num_tokens, batch, width, channels))
        # Every copy of the text contributes; summed in float32 as any gradient over ranks.
        of_text = torch.stack([piece[:text_length] for piece in arrived])
        grad[:text_length] = of_text.sum(0, dtype=torch.promote_types(of_text.dtype, torch.float32))
        torch.cat([piece[text_length:] for piece in arrived], out=grad[text_length:])
        return None, _head_first(grad), None


def _fill(piece: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Writes `parts` (tokens, B, heads, D) side by side along the heads of `piece`."""
    for target, part in zip(piece.split([part.shape[2] for part in parts], dim=2), parts, strict=True):
        target.copy_(part)


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
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.group is not None
        heads = split_heads(query.shape[1], key.shape[1], self.degree)
        exchange = HeadExchange(self.group, self.rank, tuple(self.local_sizes(name)), heads)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        query, key, value = exchange.to_heads(query, key, value, text)
        mask = joint_key_mask(text_mask, exchange.num_tokens)
        out = attention(query, key, value, key_mask=mask, scale=scale)
        return exchange.to_tokens(out, 0 if text is None else text[0].shape[2])
