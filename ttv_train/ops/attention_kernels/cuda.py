"""Attention on NVIDIA and AMD GPUs: the flash-attn package where it is installed, else what torch ships."""

import math

import torch
import torch.nn.functional as F

from ttv_train.ops.attention_kernels.base import HALF, AttentionBlock, AttentionKernel, TensorPair, TensorTriple

CUDA = frozenset({"cuda"})

LSE_MULTIPLE = 32
"""torch's efficient attention keeps the log-sum-exp of a multiple of so many queries."""
BIAS_MULTIPLE = 16
"""Rows of its bias must start at multiples of so many elements."""


def _flash_attn_forward(block: AttentionBlock) -> TensorPair:
    from flash_attn import flash_attn_interface  # type: ignore[import-not-found]

    # The package has tokens before heads: (B, tokens, heads, D).
    out, lse, _, _ = flash_attn_interface._flash_attn_forward(
        *(x.transpose(1, 2) for x in (block.query, block.key, block.value)),
        dropout_p=0.0,
        softmax_scale=block.scale,
        causal=block.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return out.transpose(1, 2), lse


def _flash_attn_backward(
    block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> TensorTriple:
    from flash_attn import flash_attn_interface

    query, key, value = (x.transpose(1, 2) for x in (block.query, block.key, block.value))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    flash_attn_interface._flash_attn_backward(
        grad_out.transpose(1, 2),
        query,
        key,
        value,
        out.transpose(1, 2),
        lse.contiguous(),
        *grads,
        dropout_p=0.0,
        softmax_scale=block.scale,
        causal=block.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    )
    grad_query, grad_key, grad_value = (grad.transpose(1, 2) for grad in grads)
    return grad_query, grad_key, grad_value


def _flash_forward(block: AttentionBlock) -> TensorPair:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        block.query, block.key, block.value, 0.0, block.causal, scale=block.scale
    )
    return out, lse


def _flash_backward(
    block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> TensorTriple:
    # Without dropout and varying lengths, the random state and the cumulative lengths are not read.
    unused = torch.empty(2, dtype=torch.uint64, device=out.device)
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        block.query,
        block.key,
        block.value,
        out,
        lse.contiguous(),
        None,
        None,
        block.query.shape[2],
        block.key.shape[2],
        0.0,
        block.causal,
        unused,
        unused,
        scale=block.scale,
    )
    return grad_query, grad_key, grad_value


def _efficient_bias(block: AttentionBlock) -> torch.Tensor | None:
    mask = block.additive_mask()
    if mask is None:
        return None
    aligned = F.pad(mask, (0, -mask.shape[3] % BIAS_MULTIPLE))[..., : mask.shape[3]]
    return aligned.expand(-1, block.query.shape[1], block.query.shape[2], -1)


def _efficient_forward(block: AttentionBlock) -> TensorPair:
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        block.query, block.key, block.value, _efficient_bias(block), True, 0.0, block.causal, scale=block.scale
    )
    return out, lse[..., : block.query.shape[2]]


def _efficient_backward(
    block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> TensorTriple:
    padded = F.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=math.inf)
    unused = torch.empty((), dtype=torch.int64, device=out.device)
    grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        block.query,
        block.key,
        block.value,
        _efficient_bias(block),
        out,
        padded,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        block.causal,
        scale=block.scale,
    )
    return grad_query, grad_key, grad_value


FLASH_ATTN = AttentionKernel(
    "flash_attn",
    _flash_attn_forward,
    _flash_attn_backward,
    device_types=CUDA,
    dtypes=HALF,
    supports_mask=False,
    channel_multiple=8,
    requires_module="flash_attn",
)
CUDA_FLASH = AttentionKernel(
    "cuda_flash",
    _flash_forward,
    _flash_backward,
    device_types=CUDA,
    dtypes=HALF,
    supports_mask=False,
    channel_multiple=8,
)
CUDA_EFFICIENT = AttentionKernel(
    "cuda_efficient",
    _efficient_forward,
    _efficient_backward,
    device_types=CUDA,
    dtypes=HALF | {torch.float32},
    supports_grouped_heads=False,
    channel_multiple=8,
)
