"""Attention over local tensors, differentiable, with key masks and grouped-query heads.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), Q queries, K keys, D channels per head.
"""

import torch
import torch.nn.functional as F


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(query key^T scale) value.

    Cross attention to text is this function with the text as keys: under sequence parallelism text is replicated and
    queries are local, so nothing is exchanged.

    Args:
        query: (B, H, Q, D).
        key, value: (B, G, K, D).
        key_mask: (B, K) bool, True where a key may be attended to. A query whose keys are all masked gives zeros.
        scale: factor of the logits, by default D ** -0.5.

    Returns:
        (B, H, Q, D).
    """
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def joint_key_mask(text_mask: torch.Tensor | None, num_video_tokens: int) -> torch.Tensor | None:
    """The key mask of text followed by video: text as `text_mask` (B, L) says, every video token.

    Returns:
        (B, L + num_video_tokens) bool, or None when there is no text mask.
    """
    return None if text_mask is None else F.pad(text_mask, (0, num_video_tokens), value=True)
