"""Attention kernels that return the log-sum-exp, and the choice among them."""

from functools import cache

import torch

from ttv_train.ops.attention_kernels.base import AttentionBlock, AttentionKernel
from ttv_train.ops.attention_kernels.cpu import CPU_FLASH
from ttv_train.ops.attention_kernels.cuda import CUDA_EFFICIENT, CUDA_FLASH, FLASH_ATTN
from ttv_train.ops.attention_kernels.npu import NPU
from ttv_train.ops.attention_kernels.reference import REFERENCE

__all__ = ["KERNELS", "AttentionBlock", "AttentionKernel", "select_kernel"]

KERNELS: tuple[AttentionKernel, ...] = (CPU_FLASH, FLASH_ATTN, CUDA_FLASH, CUDA_EFFICIENT, NPU, REFERENCE)
"""In order of preference; the last one always fits."""


@cache
def select_kernel(device_type: str, dtype: torch.dtype, channels: int, masked: bool) -> AttentionKernel:
    """The first kernel that can compute attention over such tensors on this machine."""
    return next(kernel for kernel in KERNELS if kernel.fits(device_type, dtype, channels, masked))
