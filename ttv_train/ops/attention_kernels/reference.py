"""Attention in plain torch: any device, any type; the logits are materialized. It is what other kernels are tested
against, and what runs where none of them fits."""

import math

import torch

from ttv_train.ops.attention_kernels.base import AttentionBlock, AttentionKernel, TensorPair, TensorTriple


def _expand_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _in_high_precision(block: AttentionBlock) -> TensorTriple:
    """Query, key and value in at least float32, with as many key/value heads as query heads."""
    dtype, num_heads = torch.promote_types(block.query.dtype, torch.float32), block.query.shape[1]
    key, value = (_expand_heads(x.to(dtype), num_heads) for x in (block.key, block.value))
    return block.query.to(dtype), key, value


def _logits(block: AttentionBlock, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    logits = query @ key.mT * block.scale
    if block.causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        return logits.masked_fill(later, -math.inf)
    mask = block.additive_mask()
    return logits if mask is None else logits + mask


def forward(block: AttentionBlock) -> TensorPair:
    query, key, value = _in_high_precision(block)
    logits = _logits(block, query, key)
    lse = logits.logsumexp(-1)
    return (torch.exp(logits - lse[..., None]) @ value).to(block.query.dtype), lse


def backward(block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> TensorTriple:
    # FlashAttention-2, algorithm 2: P = exp(logits - lse), dS = P (dP - rowsum(dO O)).
    query, key, value = _in_high_precision(block)
    grad_out, out = grad_out.to(query.dtype), out.to(query.dtype)
    probabilities = torch.exp(_logits(block, query, key) - lse[..., None])
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_logits = probabilities * (grad_out @ value.mT - delta) * block.scale
    grads = grad_logits.mT @ query, probabilities.mT @ grad_out
    grad_key, grad_value = (grad.unflatten(1, (block.key.shape[1], -1)).sum(2).to(block.key.dtype) for grad in grads)
    return (grad_logits @ key).to(block.query.dtype), grad_key, grad_value


REFERENCE = AttentionKernel("reference", forward, backward)
