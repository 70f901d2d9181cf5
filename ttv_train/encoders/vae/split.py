"""One clip on several ranks: each holds a range of its frames or of its rows, and asks its neighbours for the rest.

Shapes: x is (B, C, T, H, W). A split is along `dim` 2 (frames) or 3 (rows). Ranges are whole latent positions, so that
every layer's strides fit: in time the first latent frame is one frame and every other one `temporal_factor` frames.
A clip with fewer latent positions than ranks leaves the last ranks idle; they only receive the latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ttv_train.parallel.collectives import Transfer, all_gather_rows, start_transfer

TIME, ROWS = 2, 3

HALO = "vae_halo"
"""Purpose under which frames and rows for the neighbours' convolutions are counted."""
NORM = "vae_norm"
"""Purpose under which the statistics of group norms are counted."""
ATTENTION = "vae_attention"
"""Purpose under which keys and values of attention layers are counted."""
LATENTS = "vae_latents"
"""Purpose under which the finished latents, which every rank gets, are counted."""

PadMode = Literal["zeros", "replicate"]


@dataclass(frozen=True)
class Segment:
    """Positions `start` to `stop - 1` of the local part, which share a norm's statistics with those of `ranks`."""

    start: int
    stop: int
    ranks: Sequence[int]


class Split:
    """The part of a clip that this rank of `group` holds.

    Args:
        dim: `TIME` or `ROWS`.
        sizes: latent positions of every rank of the group; zeros only at the end.
        group: the ranks that share the clip, or None for this process alone.
    """

    def __init__(self, dim: int, sizes: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.dim = dim
        self.sizes = list(sizes)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.active = [rank for rank, size in enumerate(self.sizes) if size]
        self._group = group

    @property
    def has_first_frame(self) -> bool:
        """Whether the clip's first frame is in this part."""
        return self.dim == ROWS or self.rank == 0

    @property
    def is_idle(self) -> bool:
        return self.sizes[self.rank] == 0

    def padded(self, x: torch.Tensor, before: int, after: int, mode: PadMode) -> torch.Tensor:
        """`x` with the `before` positions that precede it and the `after` ones that follow it, from the neighbours; at
        the clip's own ends, padding."""
        previous = self.rank - 1 if self.rank > 0 else None
        following = self.rank + 1 if self.rank < len(self.active) - 1 else None
        sends, receives = [], []
        head, tail = _edge(x, self.dim, before, mode, "start"), _edge(x, self.dim, after, mode, "end")
        if previous is not None:
            head = _empty(x, self.dim, before)
            receives.append((head, previous))
            sends.append((x.narrow(self.dim, 0, after).contiguous(), previous))
        if following is not None:
            tail = _empty(x, self.dim, after)
            receives.append((tail, following))
            sends.append((x.narrow(self.dim, x.shape[self.dim] - before, before).contiguous(), following))
        self._transfer(sends, receives, HALO).wait()
        return torch.cat([head, x, tail], self.dim)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of all ranks that have a part, joined along `dim`; x has one position per latent position, or a whole
        multiple of it."""
        scale = x.shape[self.dim] // self.sizes[self.rank]
        rows = x.movedim(self.dim, 0).contiguous()
        sizes = [self.sizes[rank] * scale for rank in self.active]
        output = rows.new_empty(sum(sizes), *rows.shape[1:])
        pieces = dict(zip(self.active, output.split(sizes), strict=True))
        pieces[self.rank].copy_(rows)
        peers = [rank for rank in self.active if rank != self.rank]
        self._transfer([(rows, peer) for peer in peers], [(pieces[peer], peer) for peer in peers], ATTENTION).wait()
        return output.movedim(0, self.dim)

    def segments(self, x: torch.Tensor) -> list[Segment]:
        """The parts of `x` over which a norm takes its statistics: all of it, with all other ranks'."""
        return [Segment(0, x.shape[self.dim], self.active)]

    def exchange(self, statistics: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """The equally shaped `statistics` of each of `ranks`, in their order."""
        found = [statistics if rank == self.rank else torch.empty_like(statistics) for rank in ranks]
        peers = [rank for rank in ranks if rank != self.rank]
        receives = [(tensor, rank) for tensor, rank in zip(found, ranks, strict=True) if rank != self.rank]
        self._transfer([(statistics, peer) for peer in peers], receives, NORM).wait()
        return found

    def gather_latents(self, part: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The latents of all parts, on every rank. An idle rank has no part and passes None.

        Args:
            part: (B, C, t, h, w), this rank's range.
            like: any tensor of the latents' dtype and device.
        """
        if self._group is None or len(self.sizes) == 1:
            assert part is not None
            return part
        idle = [rank for rank, size in enumerate(self.sizes) if not size]
        rows = None if part is None else part.movedim(self.dim, 0).contiguous()
        # An idle rank has not run the encoder, so it is told what a latent position looks like.
        shape = torch.tensor([0] * 4 if rows is None else rows.shape[1:], device=like.device)
        self._transfer(
            [(shape, rank) for rank in idle] if self.rank == 0 else [],
            [(shape, 0)] if self.is_idle else [],
            LATENTS,
        ).wait()
        if rows is None:
            rows = like.new_empty(0, *shape.tolist())
        output = rows.new_empty(sum(self.sizes), *rows.shape[1:])
        all_gather_rows(output, rows, self.sizes, self._group, LATENTS).wait()
        return output.movedim(0, self.dim)

    def _transfer(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        purpose: str,
    ) -> Transfer:
        if self._group is None:
            assert not sends and not receives
            return Transfer([], [], purpose)
        return start_transfer(sends, receives, self._group, purpose)


def _empty(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:dim], length, *x.shape[dim + 1 :])


def _edge(x: torch.Tensor, dim: int, length: int, mode: PadMode, side: Literal["start", "end"]) -> torch.Tensor:
    """`length` positions of padding."""
    if mode == "zeros":
        return x.new_zeros(*x.shape[:dim], length, *x.shape[dim + 1 :])
    position = 0 if side == "start" else x.shape[dim] - 1
    return x.narrow(dim, position, 1).expand(*x.shape[:dim], length, *x.shape[dim + 1 :])


class TimeSplit(Split):
    """A range of frames, in one of the rounds in which a clip goes through the encoder.

    The ranks form a ring: in every round each holds the frames that follow the previous rank's, and the first rank
    those that follow the last rank's of the round before. Every causal layer passes on the last frames that it has
    seen. One rank and several rounds is chunk-by-chunk encoding with carried state; several ranks and one round is the
    plain split.

    Args:
        sizes: latent frames of every rank in this round.
        group: the ranks that share the clip, or None.
        previous: the split of the round before, or None in the first one.
        is_last: whether this is the last round.
        batches: latent frames after which a norm's statistics begin anew, counted from this round's first one: the
            ends of the VAE's frame batches. Empty where a norm spans the round.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        group: dist.ProcessGroup | None,
        previous: "TimeSplit | None" = None,
        is_last: bool = True,
        batches: Sequence[int] = (),
    ) -> None:
        super().__init__(TIME, sizes, group)
        self._carried = previous._kept if previous is not None else None
        self._kept: list[tuple[torch.Tensor, Transfer]] = []
        self._is_last_round = is_last
        self._num_layers = 0
        self._batches = list(batches) or [sum(self.sizes)]

    @property
    def has_first_frame(self) -> bool:
        return self.rank == 0 and self._carried is None

    def preceding(self, x: torch.Tensor, before: int, padding: torch.Tensor) -> torch.Tensor:
        """The `before` frames that precede x; `padding` (B, C, *, H, W) if it starts with the clip's first frame."""
        layer, self._num_layers = self._num_layers, self._num_layers + 1
        next_rank = (self.rank + 1) % len(self.active)
        passes_on = self.rank != self.active[-1] or not self._is_last_round
        # A part that is shorter than what its successor needs passes on some of what it was given.
        tail = x.narrow(TIME, x.shape[TIME] - before, before).contiguous() if x.shape[TIME] >= before else None
        remote = passes_on and next_rank != self.rank
        sends = [(tail, next_rank)] if tail is not None and remote else []
        if self.rank == 0 and self._carried is None:
            sending = self._transfer(sends, [], HALO)
            halo = padding
        elif self.rank == 0:
            sending = self._transfer(sends, [], HALO)
            assert self._carried is not None
            halo, arriving = self._carried[layer]
            arriving.wait()
        else:
            halo = _empty(x, TIME, before)
            sending = self._transfer(sends, [(halo, self.rank - 1)], HALO)
        sending.wait()
        if tail is None:
            tail = torch.cat([halo[:, :, halo.shape[TIME] + x.shape[TIME] - before :], x], TIME)
            if remote:
                self._transfer([(tail, next_rank)], [], HALO).wait()
        if self.rank == 0 and not self._is_last_round:
            if len(self.active) == 1:
                self._kept.append((tail, Transfer([], [], HALO)))
            else:
                arriving_halo = _empty(x, TIME, before)
                arriving = self._transfer([], [(arriving_halo, self.active[-1])], HALO)
                self._kept.append((arriving_halo, arriving))
        return halo

    def segments(self, x: torch.Tensor) -> list[Segment]:
        """The VAE's frame batches within `x`, each with the ranks that hold some of it."""
        ends = [sum(self.sizes[: rank + 1]) for rank in range(len(self.sizes))]
        first, last = ends[self.rank] - self.sizes[self.rank], ends[self.rank]
        frames = x.shape[TIME]
        # At this layer a latent frame is `stride` frames, but the clip's first one is a single frame.
        extra = 1 if self.has_first_frame else 0
        stride = (frames - extra) // max(1, last - first - extra)
        found, start = [], 0
        for batch_first, batch_last in zip([0, *self._batches], self._batches, strict=False):
            if batch_last <= first or batch_first >= last:
                continue
            stop = frames if batch_last >= last else (batch_last - first - extra) * stride + extra
            ranks = [
                rank for rank in self.active if ends[rank] > batch_first and ends[rank] - self.sizes[rank] < batch_last
            ]
            found.append(Segment(start, stop, ranks))
            start = stop
        return found
