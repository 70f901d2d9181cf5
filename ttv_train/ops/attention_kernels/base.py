"""What an attention kernel is given, what it returns, and how it says what it can do.

A kernel returns the log-sum-exp of its logits. With it, attention over a few keys can be merged with attention over
others, and a block's share of the gradient follows from the output and log-sum-exp of the whole. Flash kernels work
that way inside (FlashAttention-2, arXiv 2307.08691); ring attention does the same between ranks.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

TensorPair = tuple[torch.Tensor, torch.Tensor]
TensorTriple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and some of the keys that they attend to; none of the tensors is empty."""

    query: torch.Tensor
    """(B, H, Q, D)."""
    key: torch.Tensor
    """(B, G, K, D), H a multiple of G."""
    value: torch.Tensor
    """(B, G, K, D)."""
    key_mask: torch.Tensor | None
    """(B, K) bool, True where a key may be attended to."""
    scale: float
    """Factor of the logits."""
    causal: bool = False
    """Queries and keys are the same tokens, and a query attends to the keys up to its own. Never with a mask."""

    def additive_mask(self) -> torch.Tensor | None:
        """(B, 1, 1, K): 0 where a key may be attended to, -inf elsewhere."""
        if self.key_mask is None:
            return None
        return torch.where(self.key_mask, 0.0, -math.inf).to(self.query.dtype)[:, None, None, :]


@dataclass(frozen=True)
class AttentionKernel:
    """A pair of functions and their capabilities."""

    name: str
    forward: Callable[[AttentionBlock], TensorPair]
    """Output (B, H, Q, D) and log-sum-exp (B, H, Q), the latter in float32 or float64."""
    backward: Callable[[AttentionBlock, torch.Tensor, torch.Tensor, torch.Tensor], TensorTriple]
    """(block, grad_out, out, log-sum-exp) to the gradients of query, key and value. `out` and the log-sum-exp may be
    those of attention over more keys than the block's."""
    device_types: frozenset[str] | None = None
    """`None`: any device."""
    dtypes: frozenset[torch.dtype] | None = None
    """`None`: any floating-point type."""
    supports_mask: bool = True
    supports_grouped_heads: bool = True
    """Otherwise it is given repeated key/value heads."""
    channel_multiple: int = 1
    """Channels per head must be a multiple of it."""
    requires_module: str | None = None
    """Python module that must be installed."""

    def fits(self, device_type: str, dtype: torch.dtype, channels: int, masked: bool) -> bool:
        """Whether the kernel can compute attention over such tensors on this machine."""
        return (
            (self.device_types is None or device_type in self.device_types)
            and (self.dtypes is None or dtype in self.dtypes)
            and channels % self.channel_multiple == 0
            and (self.supports_mask or not masked)
            and (self.requires_module is None or importlib.util.find_spec(self.requires_module) is not None)
        )
