"""Attention over local tensors, whole or block by block.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), Q queries, K keys, D channels per head.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ttv_train.ops.attention_kernels import AttentionBlock, select_kernel

KERNEL_DEVICE_TYPES = frozenset({"npu"})
"""Devices on which torch's scaled_dot_product_attention is not the fastest: our choice of kernel is used instead."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(query key^T scale) value, differentiable.

    Cross attention to text is this function with the text as keys: under sequence parallelism text is replicated and
    queries are local, so nothing is exchanged.

    Args:
        query: (B, H, Q, D).
        key, value: (B, G, K, D).
        key_mask: (B, K) bool, True where a key may be attended to.
        scale: factor of the logits, by default D ** -0.5.

    Returns:
        (B, H, Q, D).
    """
    if query.device.type in KERNEL_DEVICE_TYPES:
        return _KernelAttention.apply(query, key, value, key_mask, query.shape[3] ** -0.5 if scale is None else scale)
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def block_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_length: int, scale: float | None = None
) -> torch.Tensor:
    """Attention in which a token sees its own block of `block_length` tokens and the blocks before it.

    Args:
        query: (B, H, S, D).
        key, value: (B, G, S, D) of the same tokens.

    Returns:
        (B, H, S, D).
    """
    if block_length == 1:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    # Block by block, the keys that are seen are a prefix: no mask is needed, and nothing unseen is computed.
    stops = [min(start + block_length, query.shape[2]) for start in range(0, query.shape[2], block_length)]
    blocks = [
        attention(queries, key[:, :, :stop], value[:, :, :stop], scale=scale)
        for queries, stop in zip(query.split(block_length, dim=2), stops, strict=True)
    ]
    return torch.cat(blocks, dim=2)


def joint_key_mask(text_mask: torch.Tensor | None, num_video_tokens: int) -> torch.Tensor | None:
    """The key mask of text followed by video: text as `text_mask` (B, L) says, every video token.

    Returns:
        (B, L + num_video_tokens) bool, or None when there is no text mask.
    """
    return None if text_mask is None else F.pad(text_mask, (0, num_video_tokens), value=True)


class _KernelAttention(torch.autograd.Function):
    """`attention` by the kernels of `ops.attention_kernels`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        out, lse = block_attention(AttentionBlock(query, key, value, key_mask, scale))
        ctx.save_for_backward(query, key, value, key_mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, key_mask, out, lse = ctx.saved_tensors
        block = AttentionBlock(query, key, value, key_mask, ctx.scale)
        return *block_attention_backward(block, grads[0], out, lse), None, None


def block_attention(block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of one block, without autograd.

    Returns:
        Output (B, H, Q, D) in the type of the query and log-sum-exp (B, H, Q) in float32 (float64 for float64). A query
        that may attend to no key has output 0 and log-sum-exp -inf.
    """
    query, key = block.query, block.key
    if query.numel() == 0 or key.numel() == 0:
        lse_dtype = torch.promote_types(query.dtype, torch.float32)
        return torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=lse_dtype)
    kernel = select_kernel(query.device.type, query.dtype, query.shape[3], block.key_mask is not None)
    out, lse = kernel.forward(block if kernel.supports_grouped_heads else _with_repeated_heads(block))
    if block.key_mask is not None:
        # Kernels differ in what they return for a row without keys.
        keyless = ~block.key_mask.any(dim=1)[:, None, None]
        out, lse = out.masked_fill(keyless[..., None], 0.0), lse.masked_fill(keyless, -math.inf)
    return out, lse


def block_attention_backward(
    block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value that pass through one block's keys.

    Args:
        grad_out, out: (B, H, Q, D), gradient and value of the output of attention to all keys, of which the block's may
            be a part.
        lse: (B, H, Q), its log-sum-exp.
    """
    query, key, value = block.query, block.key, block.value
    if query.numel() == 0 or key.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    # A query without keys: exp(-inf - inf) is 0, where exp(-inf + inf) would be NaN.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    kernel = select_kernel(query.device.type, query.dtype, query.shape[3], block.key_mask is not None)
    if kernel.supports_grouped_heads:
        return kernel.backward(block, grad_out, out, lse)
    grad_query, *grads = kernel.backward(_with_repeated_heads(block), grad_out, out, lse)
    grad_key, grad_value = (grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in grads)
    return grad_query, grad_key, grad_value


def merge_(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> torch.Tensor:
    """Merges attention to further keys into `out` in place and returns the log-sum-exp over all of them.

    With l and l' the log-sum-exps, the new output is the mean of both weighted by exp(l) and exp(l'): `block_out`
    enters with exp(l') / (exp(l) + exp(l')) = sigmoid(l' - l).

    Args:
        out: (B, H, Q, D) float32 or float64.
        lse, block_lse: (B, H, Q), not both -inf at one query.
        block_out: (B, H, Q, D).
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    return torch.logaddexp(lse, block_lse)


def _with_repeated_heads(block: AttentionBlock) -> AttentionBlock:
    """The block with as many key/value heads as query heads."""
    repeats = block.query.shape[1] // block.key.shape[1]
    if repeats == 1:
        return block
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (block.key, block.value))
    return replace(block, key=key, value=value)
