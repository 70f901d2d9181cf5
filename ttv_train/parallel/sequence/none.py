"""No sequence parallelism: one rank holds all tokens. What the other schemes are compared with."""

import torch

from ttv_train.ops.attention import attention, block_causal_attention, joint_key_mask
from ttv_train.parallel.sequence.base import SequenceParallel, TextTensors


def local_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: TextTensors | None,
    text_mask: torch.Tensor | None,
    scale: float | None,
    causal_block: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Joint attention over tokens that are all local; arguments and results as in `SequenceParallel.attention`."""
    if causal_block is not None:
        return block_causal_attention(query, key, value, causal_block, scale), None
    if text is None:
        return attention(query, key, value, scale=scale), None
    q, k, v = (
        torch.cat((of_text, of_video), dim=2) for of_text, of_video in zip(text, (query, key, value), strict=True)
    )
    out = attention(q, k, v, key_mask=joint_key_mask(text_mask, query.shape[2]), scale=scale)
    text_out, video_out = out.split([text[0].shape[2], query.shape[2]], dim=2)
    return video_out, text_out


class NoSequenceParallel(SequenceParallel):
    """The same call sites with one rank: nothing is cut, joined or sent."""

    scheme = "none"
    attention_exchanges = False

    def __init__(self) -> None:
        super().__init__(None)

    def shard(self, x: torch.Tensor, dim: int, name: str = "tokens") -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, dim: int, name: str = "tokens") -> torch.Tensor:
        return x

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text: TextTensors | None,
        text_mask: torch.Tensor | None,
        scale: float | None,
        causal_block: int | None,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return local_attention(query, key, value, text, text_mask, scale, causal_block)
