"""Exact encoding of one clip by several ranks, or by one in bounded memory.

The VAE of diffusers stays as it is, with its weights and its own loop over frames. While a clip is encoded, its encoder
cuts its input, the layers that see neighbouring positions get them from the other ranks (`layer_tables`), and the
latents are put together again, on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.encoders.vae.layer_tables import TABLES, LayerTable
from ttv_train.encoders.vae.split import ROWS, TIME, Split, TimeSplit
from ttv_train.parallel.sequence.shapes import split_sizes


class ParallelEncoder:
    """Encodes clips with a VAE of diffusers on the ranks of a group, all of which call `moments` with the same clip.

    Args:
        vae: an instance of a class in `TABLES`.
        temporal_factor, spatial_factor: frames per latent frame, and rows per latent row.
        dim: `TIME` or `ROWS`.
        group: the ranks that share each clip, or None for this process alone.
        chunk_latent_frames: along time, how many latent frames a rank holds at a time, as far as the VAE's norms allow;
            None for its whole share of the clip.
    """

    def __init__(
        self,
        vae: Any,
        temporal_factor: int,
        spatial_factor: int,
        dim: int,
        group: dist.ProcessGroup | None,
        chunk_latent_frames: int | None = None,
    ) -> None:
        self._vae = vae
        self._table = TABLES[type(vae).__name__]
        self._temporal_factor = temporal_factor
        self._spatial_factor = spatial_factor
        self._dim = dim
        self._group = group
        self._degree = 1 if group is None else dist.get_world_size(group)
        self._chunk = chunk_latent_frames

    def moments(self, video: torch.Tensor) -> torch.Tensor:
        """Mean and log-variance (B, 2 C, t, h, w) of a clip (B, 3, T, H, W), the same on every rank."""
        latent_rows = video.shape[ROWS] // self._spatial_factor
        encode = self._encode_rows if self._dim == ROWS else self._encode_frames
        with _replaced(self._vae.encoder, partial(encode, self._vae.encoder.forward, latent_rows)):
            if self._dim == TIME and self._table.whole_clip:
                return self._whole_clip(video)
            moments: torch.Tensor = self._vae._encode(video)
            return moments

    def _whole_clip(self, video: torch.Tensor) -> torch.Tensor:
        """`vae._encode` without its loop over frame batches."""
        vae = self._vae
        if self._table.prepare is not None:
            video = self._table.prepare(vae, video)
        moments = vae.encoder(video)
        quant_conv = getattr(vae, "quant_conv", None)
        return moments if quant_conv is None else quant_conv(moments)

    def _encode_rows(self, forward: Callable[..., Any], latent_rows: int, x: torch.Tensor, **state: Any) -> Any:
        """`vae.encoder` on this rank's rows; `state` is what the VAE carries between its frame batches."""
        split = Split(ROWS, split_sizes(latent_rows, self._degree), self._group)
        start, stop = (sum(split.sizes[:end]) * (x.shape[ROWS] // latent_rows) for end in (split.rank, split.rank + 1))
        part: Any = None
        new_state: Any = None
        if not split.is_idle:
            with _layers_on(self._vae.encoder, self._table, split):
                part = forward(x[:, :, :, start:stop], **state)
            if isinstance(part, tuple):
                part, new_state = part
        moments = split.gather_latents(part, x)
        return (moments, new_state) if "conv_cache" in state else moments

    def _encode_frames(self, forward: Callable[..., Any], latent_rows: int, x: torch.Tensor) -> torch.Tensor:
        """`vae.encoder` on this rank's frames, round by round."""
        moments: list[torch.Tensor] = []
        done, previous = 0, None
        rounds = self._rounds(x.shape[TIME])
        for number, batches in enumerate(rounds):
            sizes = split_sizes(batches[-1], self._degree)
            split = TimeSplit(sizes, self._group, previous, number == len(rounds) - 1, batches)
            first = done + sum(sizes[: split.rank])
            part: Any = None
            if not split.is_idle:
                start, stop = self._first_frame(first), self._first_frame(first + sizes[split.rank])
                with _layers_on(self._vae.encoder, self._table, split):
                    part = forward(x[:, :, start:stop])
                if isinstance(part, tuple):
                    part, _ = part
            moments.append(split.gather_latents(part, x))
            done, previous = done + batches[-1], split
        return torch.cat(moments, TIME)

    def _rounds(self, num_frames: int) -> list[list[int]]:
        """For every round the latent frames, counted from its first one, at which norms begin anew; the last entry is
        the round's length."""
        total = (num_frames - 1) // self._temporal_factor + 1
        ends = [total]
        if self._table.frame_batches is not None:
            ends = self._table.frame_batches(self._vae, num_frames)
        if self._chunk is None or not self._table.whole_clip:
            return [ends]
        capacity = self._chunk * self._degree
        if self._table.frame_batches is None:
            return [[min(capacity, total - start)] for start in range(0, total, capacity)]
        rounds: list[list[int]] = []
        start = last = 0
        for end in ends:
            if rounds and end - start <= capacity:
                rounds[-1].append(end - start)
            else:
                start = last
                rounds.append([end - start])
            last = end
        return rounds

    def _first_frame(self, latent_frame: int) -> int:
        return 0 if latent_frame == 0 else 1 + (latent_frame - 1) * self._temporal_factor


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _layers_on(encoder: Any, table: LayerTable, split: Split) -> Iterator[None]:
    """Has the layers of `encoder` compute their share of a split clip."""
    layers = table.of(split.dim)
    modules = [module for module in encoder.modules() if type(module) in layers]
    for module in modules:
        module.forward = partial(layers[type(module)], module, split)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
