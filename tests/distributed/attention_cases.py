"""Shapes on which every scheme of sequence parallelism must equal one process, and the comparison."""

from dataclasses import dataclass, replace

import torch

from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.none import NoSequenceParallel


@dataclass(frozen=True)
class AttentionCase:
    """One attention layer; `text_lengths` are the valid text tokens of each sample, or None for no text."""

    tokens: int = 12
    heads: int = 4
    key_heads: int | None = None
    batch: int = 2
    channels: int = 8
    text_lengths: tuple[int, ...] | None = None
    masked: bool = False
    dtype: torch.dtype = torch.float64


TEXT = AttentionCase(text_lengths=(5, 5))
RAGGED = AttentionCase(text_lengths=(2, 5), masked=True)
CASES: dict[str, AttentionCase] = {
    "even": AttentionCase(),
    "prime": AttentionCase(tokens=13),
    **{f"{tokens}-tokens": AttentionCase(tokens=tokens, batch=1, text_lengths=(3,)) for tokens in (1, 2, 3, 5, 7)},
    "1-token-no-text": AttentionCase(tokens=1),
    "uneven-heads": AttentionCase(tokens=11, heads=5),
    "30-heads": AttentionCase(tokens=7, heads=30, channels=4, batch=1),
    "text": TEXT,
    "text-uneven": replace(TEXT, tokens=11, heads=7),
    "ragged": RAGGED,
    "ragged-prime": replace(RAGGED, tokens=17, heads=5),
    "empty-caption": replace(RAGGED, text_lengths=(0, 4), tokens=3),
    "no-text-tokens": AttentionCase(text_lengths=(0, 0)),
    "grouped": AttentionCase(heads=8, key_heads=4),
    "grouped-uneven": AttentionCase(tokens=11, heads=10, key_heads=5, text_lengths=(3, 3)),
    "grouped-shared": AttentionCase(tokens=11, heads=8, key_heads=2, text_lengths=(3, 1), masked=True),
    "one-key-head": AttentionCase(heads=6, key_heads=1),
}


@dataclass
class AttentionRun:
    """Whole inputs, the same on every rank, and gradients of the outputs."""

    tensors: dict[str, torch.Tensor]
    mask: torch.Tensor | None
    grad_video: torch.Tensor
    grad_text: torch.Tensor | None


def make_inputs(case: AttentionCase, seed: int = 0) -> AttentionRun:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        # As projections give it: tokens before heads in memory.
        x = torch.randn(case.batch, tokens, heads, case.channels, generator=generator, dtype=torch.float64)
        return x.to(case.dtype).transpose(1, 2)

    key_heads = case.key_heads or case.heads
    tensors = {
        name: draw(heads, case.tokens) for name, heads in zip("qkv", (case.heads, key_heads, key_heads), strict=True)
    }
    grad_video, grad_text, mask = draw(case.heads, case.tokens), None, None
    if case.text_lengths is not None:
        length = max(case.text_lengths)
        tensors |= {
            name: draw(heads, length)
            for name, heads in zip(("tq", "tk", "tv"), (case.heads, key_heads, key_heads), strict=True)
        }
        grad_text = draw(case.heads, length)
        if case.masked:
            mask = torch.arange(length) < torch.tensor(case.text_lengths)[:, None]
    return AttentionRun(tensors, mask, grad_video, grad_text)


def run_attention(sequence: SequenceParallel, run: AttentionRun) -> dict[str, torch.Tensor]:
    """Outputs and gradients on this rank, from whole inputs: video ones of the local tokens, text ones of this copy.

    The text's loss is counted once: each rank takes its share of it, so that gradients add up over the ranks.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in run.tensors.items()}
    q, k, v = (sequence.shard(leaves[name], 2) for name in "qkv")
    text = (leaves["tq"], leaves["tk"], leaves["tv"]) if "tq" in leaves else None
    video_out, text_out = sequence.attention(q, k, v, text=text, text_mask=run.mask)
    owned = sequence.owned(run.grad_video.shape[2])
    loss = (video_out * run.grad_video[:, :, owned]).sum()
    if text_out is not None:
        # Another share for every rank, so that a mistake in who sums what cannot cancel.
        weights = torch.arange(1, sequence.degree + 1, dtype=torch.float64)
        loss = loss + (text_out * run.grad_text).sum() * (weights[sequence.rank] / weights.sum()).to(text_out.dtype)
    loss.backward()
    result = {"out": video_out.detach()} | ({} if text_out is None else {"text_out": text_out.detach()})
    return result | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def worst_difference(case: AttentionCase, results: list[dict[str, torch.Tensor]], seed: int = 0) -> dict[str, float]:
    """Largest difference of each output and gradient from one process, over all ranks. Gradients are summed."""
    inputs = make_inputs(case, seed)
    doubled = AttentionRun(
        {name: x.double() for name, x in inputs.tensors.items()},
        inputs.mask,
        inputs.grad_video.double(),
        None if inputs.grad_text is None else inputs.grad_text.double(),
    )
    reference = run_attention(NoSequenceParallel(), doubled)
    found = {name: sum(result[name].double() for result in results) for name in reference if not name.endswith("out")}
    found["out"] = torch.cat([result["out"] for result in results], dim=2)
    differences = {name: _largest(x - reference[name]) for name, x in found.items()}
    if "text_out" in reference:
        differences["text_out"] = max(_largest(result["text_out"] - reference["text_out"]) for result in results)
    return differences
