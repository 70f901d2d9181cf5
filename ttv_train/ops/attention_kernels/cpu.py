"""torch's flash attention on the CPU."""

import torch

from ttv_train.ops.attention_kernels.base import HALF, AttentionBlock, AttentionKernel, TensorPair, TensorTriple


def forward(block: AttentionBlock) -> TensorPair:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        block.query,
        block.key,
        block.value,
        0.0,
        block.causal,
        attn_mask=block.additive_mask(),
        scale=block.scale,
    )
    return out, lse


def backward(block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> TensorTriple:
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        block.query,
        block.key,
        block.value,
        out,
        lse,
        0.0,
        block.causal,
        attn_mask=block.additive_mask(),
        scale=block.scale,
    )
    return grad_query, grad_key, grad_value


CPU_FLASH = AttentionKernel(
    "cpu_flash",
    forward,
    backward,
    device_types=frozenset({"cpu"}),
    dtypes=HALF | {torch.float32, torch.float64},
)
