"""The four messages of Ulysses: how tokens and heads are packed, exchanged and unpacked.

Operators without autograd; `ulysses` puts them together. All take the tokens per rank, the number of query and
key/value heads, and this rank in the group of that name.
"""

import torch

from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.operators import group_named, operator
from ttv_train.parallel.sequence.shapes import allocate_pieces, split_heads

PURPOSE = "ulysses"


def token_first(x: torch.Tensor) -> torch.Tensor:
    """(B, heads, tokens, D) viewed as (tokens, B, heads, D)."""
    return x.permute(2, 0, 1, 3)


def head_first(x: torch.Tensor) -> torch.Tensor:
    """(tokens, B, heads, D) viewed as (B, heads, tokens, D)."""
    return x.permute(1, 2, 0, 3)


def _empty_heads(like: torch.Tensor, heads: int, tokens: int) -> torch.Tensor:
    """An empty (B, heads, tokens, D) that lies in memory as (B, tokens, heads, D), as projections write and read it.
    `like` has the batch first and the channels last."""
    return like.new_empty((like.shape[0], tokens, heads, like.shape[-1])).transpose(1, 2)


def _empty_tokens(like: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    """An empty (tokens, B, heads, D)."""
    return like.new_empty((tokens, like.shape[0], heads, like.shape[-1]))


def _fill(piece: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Writes `parts` (B, heads, tokens, D) side by side along the heads of `piece` (tokens, B, heads, D)."""
    for target, part in zip(piece.split([part.shape[1] for part in parts], dim=2), parts, strict=True):
        target.copy_(token_first(part))


def _exchange(
    received: torch.Tensor,
    send: torch.Tensor,
    arriving: list[torch.Tensor],
    leaving: list[torch.Tensor],
    group_name: str,
) -> None:
    arriving_sizes, leaving_sizes = ([piece.numel() for piece in pieces] for pieces in (arriving, leaving))
    collectives.all_to_all(received, send, arriving_sizes, leaving_sizes, group_named(group_name), PURPOSE)


def _to_heads_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: list[torch.Tensor],
    token_sizes: list[int],
    rank: int,
    group_name: str,
) -> torch.Tensor:
    heads = split_heads(query.shape[1], key.shape[1], len(token_sizes))
    text_length = text[0].shape[2] if text else 0
    return _empty_tokens(query, text_length + sum(token_sizes), heads.width(rank))


@operator(_to_heads_shape)
def tokens_to_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: list[torch.Tensor],
    token_sizes: list[int],
    rank: int,
    group_name: str,
) -> torch.Tensor:
    """Query, key and value of local tokens, (B, all heads, S_r, D) each, and of the text, (B, all heads, L, D), to
    (L + S, B, own query, key and value heads, D)."""
    heads = split_heads(query.shape[1], key.shape[1], len(token_sizes))
    batch, _, local, channels = query.shape
    text_length = text[0].shape[2] if text else 0

    # Piece j: (S_r, B, query, key and value heads of rank j, D).
    shapes = [(local, batch, heads.width(peer), channels) for peer in range(len(token_sizes))]
    send, leaving = allocate_pieces(query, shapes)
    for peer, piece in enumerate(leaving):
        _fill(piece, [x[:, part] for x, part in zip((query, key, value), heads.of(peer), strict=True)])
    joint = _empty_tokens(query, text_length + sum(token_sizes), heads.width(rank))
    video = joint[text_length:]
    _exchange(video, send, list(video.split(token_sizes)), leaving, group_name)
    if text:
        _fill(joint[:text_length], [x[:, part] for x, part in zip(text, heads.of(rank), strict=True)])
    return joint


def _to_heads_backward_shapes(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    text_length: int,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> list[torch.Tensor]:
    local = token_sizes[rank]
    return [_empty_heads(grad_query, heads, local) for heads in (num_query_heads, num_key_heads, num_key_heads)]


@operator(_to_heads_backward_shapes)
def tokens_to_heads_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    text_length: int,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> list[torch.Tensor]:
    """Gradients (B, own heads, L + S, D) to those of the local tokens, (B, all heads, S_r, D)."""
    heads = split_heads(num_query_heads, num_key_heads, len(token_sizes))
    batch, channels = grad_query.shape[0], grad_query.shape[3]

    send = _empty_tokens(grad_query, sum(token_sizes), heads.width(rank))
    _fill(send, [grad[:, :, text_length:] for grad in (grad_query, grad_key, grad_value)])
    shapes = [(token_sizes[rank], batch, heads.width(peer), channels) for peer in range(len(token_sizes))]
    received, arriving = allocate_pieces(send, shapes)
    _exchange(received, send, arriving, list(send.split(token_sizes)), group_name)
    del send

    totals = (num_query_heads, num_key_heads, num_key_heads)
    grads = [_empty_heads(grad_query, total, token_sizes[rank]) for total in totals]
    if heads.shares_key_heads:
        for grad in grads[1:]:
            grad.zero_()
    for peer, piece in enumerate(arriving):
        parts = heads.of(peer)
        sizes = [part.stop - part.start for part in parts]
        for grad, part, arrived in zip(grads, parts, head_first(piece).split(sizes, dim=1), strict=True):
            if heads.shares_key_heads and grad is not grads[0]:
                grad[:, part] += arrived
            else:
                grad[:, part] = arrived
    return grads


def _to_tokens_shapes(
    out: torch.Tensor,
    text_length: int,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    local = token_sizes[rank]
    return _empty_heads(out, num_query_heads, local), _empty_heads(out, num_query_heads, text_length)


@operator(_to_tokens_shapes)
def heads_to_tokens(
    out: torch.Tensor,
    text_length: int,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output (B, own heads, L + S, D) to that of the local tokens and of the text, (B, all heads, S_r or L,
    D)."""
    heads = split_heads(num_query_heads, num_key_heads, len(token_sizes))
    batch, width, _, channels = out.shape
    local = token_sizes[rank]
    text_out, *video_out = token_first(out).split([text_length, *token_sizes])

    # Piece j: (L + S_j, B, own heads, D). The text goes to everyone.
    if text_length:
        send, leaving = allocate_pieces(out, [(text_length + size, batch, width, channels) for size in token_sizes])
        for piece, part in zip(leaving, video_out, strict=True):
            torch.cat((text_out, part), out=piece)
    else:
        send, leaving = token_first(out).contiguous(), video_out
    shapes = [(text_length + local, batch, heads.num_query(peer), channels) for peer in range(len(token_sizes))]
    received, arriving = allocate_pieces(out, shapes)
    _exchange(received, send, arriving, leaving, group_name)
    video, text = (_empty_heads(out, num_query_heads, tokens) for tokens in (local, text_length))
    for part, piece in zip(heads.query, arriving, strict=True):
        text[:, part], video[:, part] = head_first(piece).split([text_length, local], dim=2)
    return video, text


def _to_tokens_backward_shape(
    grad_video: torch.Tensor,
    grad_text: torch.Tensor,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> torch.Tensor:
    heads = split_heads(num_query_heads, num_key_heads, len(token_sizes))
    return _empty_tokens(grad_video, grad_text.shape[2] + sum(token_sizes), heads.num_query(rank))


@operator(_to_tokens_backward_shape)
def heads_to_tokens_backward(
    grad_video: torch.Tensor,
    grad_text: torch.Tensor,
    token_sizes: list[int],
    num_query_heads: int,
    num_key_heads: int,
    rank: int,
    group_name: str,
) -> torch.Tensor:
    """Gradients of the results of `heads_to_tokens` to that of its input, token-first: (L + S, B, own heads, D)."""
    heads = split_heads(num_query_heads, num_key_heads, len(token_sizes))
    batch, _, local, channels = grad_video.shape
    text_length, width = grad_text.shape[2], heads.num_query(rank)

    shapes = [(text_length + local, batch, heads.num_query(peer), channels) for peer in range(len(token_sizes))]
    send, leaving = allocate_pieces(grad_video, shapes)
    for part, piece in zip(heads.query, leaving, strict=True):
        torch.cat((token_first(grad_text[:, part]), token_first(grad_video[:, part])), out=piece)
    shapes = [(text_length + size, batch, width, channels) for size in token_sizes]
    received, arriving = allocate_pieces(grad_video, shapes)
    _exchange(received, send, arriving, leaving, group_name)
    if not text_length:
        return received.view(-1, batch, width, channels)
    del send, leaving
    grad = _empty_tokens(grad_video, text_length + sum(token_sizes), width)
    # Every copy of the text contributes; summed in float32 as any gradient over ranks.
    of_text = torch.stack([piece[:text_length] for piece in arriving])
    grad[:text_length] = of_text.sum(0, dtype=torch.promote_types(of_text.dtype, torch.float32))
    torch.cat([piece[text_length:] for piece in arriving], out=grad[text_length:])
    return grad
