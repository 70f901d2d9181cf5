"""Rotary positions on local tokens (RoFormer, arXiv 2104.09864)."""

import torch


def apply_rotary_interleaved(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates each pair of neighbouring channels (2i, 2i + 1) by its angle.

    Args:
        x: (B, H, S, D) query or key.
        rotary: cosine and sine, each (S, D) with every angle repeated for its pair.

    Returns:
        (B, H, S, D) of the type of `x`; the rotation is computed in at least float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(x.device, dtype) for table in rotary)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-imaginary, real), dim=-1).flatten(-2)
    return (x.to(dtype) * cos + turned.to(dtype) * sin).to(x.dtype)
