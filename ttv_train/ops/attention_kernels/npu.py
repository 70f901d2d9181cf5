"""Ascend's fused attention, through torch_npu (extra `npu`).

The operator returns each row's maximum and sum instead of the log-sum-exp, and its mask is True where a key is left
out; its documentation is in `torch_npu/_op_plugin_docs.py`.
"""

import torch

from ttv_train.ops.attention_kernels.base import HALF, AttentionBlock, AttentionKernel, TensorPair, TensorTriple

STATISTICS = 8
"""The operator repeats a row's maximum and sum so many times: (B, H, Q, 8), float32."""


def _mask(block: AttentionBlock) -> torch.Tensor | None:
    """(B, 1, Q, K) bool, or (Q, K) when it is causal."""
    if block.causal:
        Q, K = block.query.shape[2], block.key.shape[2]
        return torch.ones(Q, K, dtype=torch.bool, device=block.query.device).triu(1)
    if block.key_mask is None:
        return None
    return ~block.key_mask[:, None, None, :].expand(-1, 1, block.query.shape[2], -1)


def forward(block: AttentionBlock) -> TensorPair:
    import torch_npu

    out, maximum, total, *_ = torch_npu.npu_fusion_attention(
        block.query,
        block.key,
        block.value,
        block.query.shape[1],
        "BNSD",
        atten_mask=_mask(block),
        scale=block.scale,
    )
    return out, maximum[..., 0] + total[..., 0].log()


def backward(block: AttentionBlock, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> TensorTriple:
    import torch_npu

    # It computes exp(logits - maximum) / sum: with the log-sum-exp as maximum the sum is 1.
    maximum = lse[..., None].expand(-1, -1, -1, STATISTICS).contiguous()
    grad_query, grad_key, grad_value, *_ = torch_npu.npu_fusion_attention_grad(
        block.query,
        block.key,
        block.value,
        grad_out,
        block.query.shape[1],
        "BNSD",
        atten_mask=_mask(block),
        softmax_max=maximum,
        softmax_sum=torch.ones_like(maximum),
        attention_in=out,
        scale_value=block.scale,
    )
    return grad_query, grad_key, grad_value


NPU = AttentionKernel(
    "npu",
    forward,
    backward,
    device_types=frozenset({"npu"}),
    dtypes=HALF | {torch.float32},
    requires_module="torch_npu",
)
