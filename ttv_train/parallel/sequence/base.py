"""What every scheme of sequence parallelism offers to models: cut, attend, switch, join.

N ranks share one sequence of video tokens. Each holds a run of them, and everything that acts on tokens one by one
(projections, norms, MLPs) is computed on the local ones only. Attention is where ranks need each other, and the schemes
differ in what they exchange there. Text tokens are few: every rank holds all of them.

Gradients follow one rule: each rank computes the loss of its own tokens, and the gradient of a parameter is the SUM
over the ranks. It holds because every exchange here is differentiated as what it is, a linear map between the tensors
of all ranks; a replicated tensor gets on each rank the gradient of what that rank computed from its copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.causal import Runs, contiguous_runs, num_tokens

TextTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of the text tokens, each (B, heads, L, D), the same on every rank."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


KEPT_OPERATORS = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "npu_fusion_attention",
    }
)
"""Attention as torch dispatches it, kept by `checkpoint_contexts(keep_attention=True)` beside our own operators."""


def _keep_attention(context: Any, operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.namespace == "ttv_train" or operator._opname in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def in_order(rows: torch.Tensor, runs_of_ranks: Sequence[Runs]) -> torch.Tensor:
    """Rows (S, ...) in the order of the sequence, from rows in the order of the ranks."""
    runs = [run for runs in runs_of_ranks for run in runs]
    if runs == sorted(runs, key=lambda run: run.start):
        return rows
    pieces = zip(runs, rows.split([run.stop - run.start for run in runs]), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0].start)])


class SequenceParallel(ABC):
    """One scheme over one process group. Models call it at the same places under every scheme.

    Lengths: `shard` records how many tokens the whole sequence has, under a name; `attention`, `join` and `switch` use
    that record. A model whose sequences all have the same length needs no names. The record is that of the latest
    forward pass; backward needs none of it, except when activations are recomputed (see `checkpoint_contexts`).
    """

    scheme: ClassVar[str]
    attention_exchanges: ClassVar[bool] = True
    """Whether `attention` communicates; otherwise it acts on whatever tokens it is given."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.degree = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.join_mode: Literal["place", "gather"] = "place"
        self._lengths: dict[str, int] = {}
        self._agreed: set[str] = set()

    def runs(self, length: int) -> list[Runs]:
        """The positions that each rank holds of a sequence of `length` tokens: one run of them, empty when there are
        too few tokens. Schemes that balance causal attention give each rank several."""
        return contiguous_runs(length, self.degree)

    def owned(self, length: int) -> torch.Tensor:
        """The positions that this rank holds of a sequence of `length` tokens, int64, in the order in which it does."""
        positions = torch.arange(length)
        return torch.cat([positions[run] for run in self.runs(length)[self.rank]])

    def local_sizes(self, name: str = "tokens") -> list[int]:
        """How many tokens of the recorded sequence each rank holds.

        Raises:
            ValueError: no sequence of that name was sharded.
        """
        return [num_tokens(runs) for runs in self.runs(self.length(name))]

    def length(self, name: str = "tokens") -> int:
        """How many tokens the recorded sequence has. Raises ValueError as `local_sizes` does."""
        if name not in self._lengths:
            raise ValueError(f"no sequence {name!r} has been sharded; known: {', '.join(self._lengths) or 'none'}")
        return self._lengths[name]

    def record_length(self, length: int, name: str = "tokens") -> None:
        """Records the length of a whole sequence, for callers that cut it themselves by `owned`."""
        self._lengths[name] = length
        self._agreed.discard(name)

    def shard(self, x: torch.Tensor, dim: int, name: str = "tokens") -> torch.Tensor:
        """The local tokens of a tensor that every rank holds whole, and a record of how many there are in all.

        Args:
            x: any shape; dimension `dim` runs over the tokens.
        """
        length = x.shape[dim]
        self.record_length(length, name)
        # A copy, so that the tokens of other ranks are freed with `x`.
        pieces = [x.narrow(dim, run.start, run.stop - run.start) for run in self.runs(length)[self.rank]]
        return torch.cat(pieces, dim).contiguous()

    def join(self, x: torch.Tensor, dim: int, name: str = "tokens") -> torch.Tensor:
        """The whole sequence from local tokens, as `join_mode` says.

        `place` (training) sends nothing: the local tokens stand at their positions, the others are zero, and the loss
        is to be taken at the positions of `owned`. `gather` (sampling) has every token on every rank and no gradient.

        Raises:
            ValueError: mode `gather` where a gradient is wanted.
        """
        sizes = self.local_sizes(name)
        dim = dim % x.dim()
        assert x.shape[dim] == sizes[self.rank], (tuple(x.shape), dim, sizes)
        runs = self.runs(sum(sizes))
        if self.join_mode == "place":
            whole = x.new_zeros((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
            pieces = x.split([run.stop - run.start for run in runs[self.rank]], dim)
            for run, piece in zip(runs[self.rank], pieces, strict=True):
                whole = torch.slice_scatter(whole, piece, dim, run.start, run.stop)
            return whole
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("join mode 'gather' has no gradient: sample under torch.no_grad(), train with 'place'")
        assert self.group is not None
        rows = x.detach().movedim(dim, 0).contiguous()
        output = rows.new_empty((sum(sizes), *rows.shape[1:]))
        collectives.all_gather_rows(output, rows, sizes, self.group, "join").wait()
        return in_order(output, runs).movedim(0, dim)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within it `join` gathers: for sampling."""
        previous, self.join_mode = self.join_mode, "gather"
        try:
            yield
        finally:
            self.join_mode = previous

    def switch(
        self, x: torch.Tensor, from_dim: int, to_dim: int, from_name: str = "tokens", to_name: str = "space"
    ) -> torch.Tensor:
        """For factorised space-time models: under `dsp`, local along `from_dim` becomes local along `to_dim`. Under
        every other scheme it is the identity, and `attention` does the exchange."""
        return x

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        text: TextTensors | None = None,
        text_mask: torch.Tensor | None = None,
        scale: float | None = None,
        causal_block: int | None = None,
        name: str = "tokens",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of local video tokens, and of the text tokens if given, to all video and text tokens.

        Cross attention, where text is attended to but does not attend, needs no exchange under any scheme: call
        `ttv_train.ops.attention.attention`.

        Args:
            query: (B, H, S_local, D), positions already applied.
            key, value: (B, G, S_local, D); H is a multiple of G.
            text: text query (B, H, L, D), key and value (B, G, L, D).
            text_mask: (B, L) bool, True where a text token may be attended to.
            scale: factor of the logits, by default D ** -0.5.
            causal_block: a token attends to its own block of so many tokens and to those before it: 1 is causal
                attention, the tokens of a frame are that of autoregressive video. Without text, which such models
                attend to by cross attention.
            name: the record of the sequence that was sharded.

        Returns:
            (B, H, S_local, D) for the video, and (B, H, L, D) for the text or None. The text output is whole on every
            rank.

        Raises:
            ValueError: ranks disagree about the shapes (on every rank), a mask is given without text, or text with
                `causal_block`.
        """
        if text_mask is not None and text is None:
            raise ValueError("text_mask without text")
        if causal_block is not None and text is not None:
            raise ValueError("causal_block with text: attend to text by cross attention")
        if self.attention_exchanges:
            sizes = self.local_sizes(name)
            assert query.shape[2] == key.shape[2] == sizes[self.rank], (query.shape, key.shape, sizes)
            if name not in self._agreed:
                facts = {
                    "batch": query.shape[0],
                    "heads": query.shape[1],
                    "key/value heads": key.shape[1],
                    "head channels": query.shape[3],
                    "text tokens": -1 if text is None else text[0].shape[2],
                    "causal block": causal_block or 0,
                    "dtype": DTYPES.index(query.dtype),
                }
                self._check_agreement(name, facts, query.device)
        return self._attention(query, key, value, text, text_mask, scale, causal_block, name)

    @abstractmethod
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    @torch.compiler.disable(reason="compares numbers of all ranks once per forward pass, in its first attention")
    def _check_agreement(self, name: str, facts: dict[str, int], device: torch.device) -> None:
        """Compares the length of sequence `name` and `facts` between the ranks: where they differ, gloo would deliver
        parts of messages without an error. Once per forward pass, a message of a few integers to every rank."""
        assert self.group is not None
        facts = {f"length of {name!r}": self._lengths[name], **facts}
        mine = torch.tensor(list(facts.values()), dtype=torch.int64, device=device)
        everyone = collectives.all_gather(mine, self.group, "check").tolist()
        for fact, values in zip(facts, zip(*everyone, strict=True), strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"the ranks of a sequence-parallel group disagree about {fact}: {list(values)}")
        self._agreed.add(name)

    def checkpoint_contexts(
        self, keep_attention: bool = False
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Pass as `context_fn` to activation checkpointing, so that recomputation sees the lengths of its own forward
        pass even when another one, of another shape, came in between.

        Args:
            keep_attention: keep what attention and its exchanges return, so that recomputation repeats neither. It
                costs memory per layer and rank, in hidden tensors of local tokens: 5 under ulysses and usp, 1 under
                ring, 2 N + 1 when the ring gathers.
        """
        restored = self._restored(dict(self._lengths), set(self._agreed))
        if not keep_attention:
            return nullcontext(), restored
        keep, reuse = create_selective_checkpoint_contexts(_keep_attention)
        return keep, _both(restored, reuse)

    @contextmanager
    def _restored(self, lengths: dict[str, int], agreed: set[str]) -> Iterator[None]:
        current = self._lengths, self._agreed
        self._lengths, self._agreed = lengths, agreed
        try:
            yield
        finally:
            self._lengths, self._agreed = current
