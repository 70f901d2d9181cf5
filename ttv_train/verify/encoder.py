"""The proof that a clip encoded by several ranks has the latents of the whole clip, for every VAE and mode."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.config import VaeParallelConfig, WaveletVaeConfig
from ttv_train.encoders.vae.parallel import ParallelEncoder
from ttv_train.encoders.vae.split import ATTENTION, HALO, NORM, ROWS, TIME
from ttv_train.encoders.vae.wavelet import WaveletVae
from ttv_train.parallel import collectives
from ttv_train.parallel.sequence.shapes import split_sizes
from ttv_train.verify.peak_memory import PeakMemory
from ttv_train.verify.ranks import run_ranks
from ttv_train.verify.tiny_vaes import SETTINGS, build, halo_bytes, largest_share

VAES = (*SETTINGS, "wavelet")
MODES = {"time": TIME, "space": ROWS}
TOLERANCE = 1e-5
"""Largest difference of any mean or log-variance, in float32."""
LATENT_FRAMES = (1, 2, 3, 4, 5, 9)
"""Lengths that are compared: 1, 5, 9, 13, 17 and 33 frames where a latent frame is four."""
LATENT_ROWS = 5
MEASURED_SIZE = (17, 12)
"""Latent frames and rows of the clip whose bytes and memory are measured."""


@dataclass(frozen=True)
class EncoderRow:
    """One line of the table."""

    vae: str
    mode: str
    degree: int
    """Ranks that share each clip: the last ones of the world, so that their group does not start at rank 0."""
    is_exact: bool
    """Whether the mode promises the latents of the whole clip."""
    max_difference: float
    """From the plain encoding, over all clips."""
    halo_bytes: int
    """Sent by all ranks for the convolutions of the measured clip."""
    halo_formula: int
    """What they should have sent."""
    other_bytes: int
    """Sent for norms and attention layers."""
    peak_bytes: int
    """Of the rank that needed most, for activations and the latents, which every rank receives whole."""
    largest_share: float
    """Part of the frames or rows that this rank held: 1 / degree, or more where latent positions do not divide."""
    psnr_db: float | None
    """Of an inexact mode's latents against the exact ones; the peak is the range of the exact latents."""

    @property
    def passed(self) -> bool:
        """Whether the mode keeps what it promises."""
        return not self.is_exact or (self.max_difference <= TOLERANCE and self.halo_bytes == self.halo_formula)


@dataclass(frozen=True)
class _Measured:
    max_difference: float
    halo_bytes: int
    halo_formula: int
    other_bytes: int
    peak_bytes: int
    largest_share: float
    psnr_db: float | None = None


def verify_encoders(degrees: Sequence[int] = (1, 2, 3, 4), vaes: Sequence[str] = VAES) -> list[EncoderRow]:
    """Encodes clips of many lengths with a small VAE of each class, on gloo ranks of this machine."""
    results = run_ranks(max(degrees), _measure_all, list(degrees), list(vaes))
    rows = []
    for vae, mode, degree in dict.fromkeys(key for result in results for key in result):
        ranks = [result[vae, mode, degree] for result in results if (vae, mode, degree) in result]
        rows.append(
            EncoderRow(
                vae=vae,
                mode=mode,
                degree=degree,
                is_exact=mode != "tiled",
                max_difference=max(rank.max_difference for rank in ranks),
                halo_bytes=sum(rank.halo_bytes for rank in ranks),
                halo_formula=ranks[0].halo_formula,
                other_bytes=sum(rank.other_bytes for rank in ranks),
                peak_bytes=max(rank.peak_bytes for rank in ranks),
                largest_share=ranks[0].largest_share,
                psnr_db=ranks[0].psnr_db,
            )
        )
    return sorted(rows, key=lambda row: (row.vae, row.mode, row.degree))


def passed(rows: Sequence[EncoderRow]) -> bool:
    """Whether every exact mode is exact and sends what its formula says."""
    return all(row.passed for row in rows)


def format_table(rows: Sequence[EncoderRow]) -> str:
    """The table as text. `x share` is the memory as a multiple of what one rank's would be for the largest share; the
    latents of the wavelet are as large as its clip, and no rank is spared those of the others."""
    alone = {(row.vae, row.mode): row.peak_bytes for row in rows if row.degree == 1}
    lines = [
        f"{'VAE':26}{'mode':15}{'ranks':>6}{'difference':>12}{'halo bytes':>12}{'formula':>12}{'other':>10}"
        f"{'peak MiB':>10}{'x share':>9}  result"
    ]
    for row in rows:
        whole = alone.get((row.vae, row.mode))
        share = f"{row.peak_bytes / (whole * row.largest_share):.2f}" if whole else "-"
        result = ("ok" if row.passed else "FAILED") if row.is_exact else f"inexact, {row.psnr_db:.1f} dB"
        lines.append(
            f"{row.vae:26}{row.mode:15}{row.degree:6}{row.max_difference:12.1e}{row.halo_bytes:12}{row.halo_formula:12}"
            f"{row.other_bytes:10}{row.peak_bytes / 2**20:10.2f}{share:>9}  {result}"
        )
    return "\n".join(lines)


def as_json(rows: Sequence[EncoderRow]) -> list[dict[str, object]]:
    """The rows as plain values."""
    return [{**asdict(row), "passed": row.passed} for row in rows]


@torch.no_grad()
def _measure_all(
    rank: int, world_size: int, degrees: list[int], vaes: list[str]
) -> dict[tuple[str, str, int], _Measured]:
    found = {}
    for degree in degrees:
        group = dist.new_group(list(range(world_size - degree, world_size)))
        if rank < world_size - degree:
            continue
        for vae in vaes:
            measure = _measure_wavelet if vae == "wavelet" else _measure
            for mode in [*MODES, *(("serial_chunks", "tiled") if degree == 1 and vae != "wavelet" else ())]:
                found[vae, mode, degree] = measure(vae, mode, degree, group)
    return found


def _measure(name: str, mode: str, degree: int, group: dist.ProcessGroup) -> _Measured:
    vae, geometry = build(name)
    factor = geometry.spatial_factor

    def clip(latent_frames: int, latent_rows: int) -> torch.Tensor:
        frames = 1 + (latent_frames - 1) * geometry.temporal_factor
        return _noise(1, 3, frames, latent_rows * factor, factor)

    def encode(video: torch.Tensor) -> torch.Tensor:
        if mode == "tiled":
            return _tiled(vae, video, factor)
        chunks = mode == "serial_chunks"
        return ParallelEncoder(
            vae,
            temporal_factor=geometry.temporal_factor,
            spatial_factor=factor,
            dim=MODES.get(mode, TIME),
            group=None if chunks else group,
            chunk_latent_frames=1 if chunks else None,
        ).moments(video)

    clips = [clip(frames, LATENT_ROWS) for frames in LATENT_FRAMES]
    measured = clip(*MEASURED_SIZE)
    worst = max(float((encode(video) - vae._encode(video)).abs().max()) for video in clips)
    collectives.reset()
    with PeakMemory() as memory:
        latents = encode(measured)
    sent = collectives.snapshot()
    exact = vae._encode(measured)
    worst = max(worst, float((latents - exact).abs().max()))
    psnr = None
    if mode == "tiled":
        error = float((latents - exact).square().mean())
        psnr = 10 * math.log10(float(exact.max() - exact.min()) ** 2 / error) if error else math.inf
    return _Measured(
        max_difference=worst,
        halo_bytes=_bytes(sent, HALO),
        halo_formula=halo_bytes(vae, geometry, measured, MODES[mode], degree) if mode in MODES else 0,
        other_bytes=_bytes(sent, NORM, ATTENTION),
        peak_bytes=memory.peak_bytes,
        largest_share=largest_share(vae, geometry, measured, MODES[mode], degree) if mode in MODES else 1.0,
        psnr_db=psnr,
    )


def _measure_wavelet(name: str, mode: str, degree: int, group: dist.ProcessGroup) -> _Measured:
    cpu = torch.device("cpu")
    plain = WaveletVae(WaveletVaeConfig(kind="wavelet"), cpu)
    shared = WaveletVae(
        WaveletVaeConfig.model_validate({"kind": name, "parallel": VaeParallelConfig.model_validate({"mode": mode})}),
        cpu,
        group,
    )
    worst = 0.0
    for latent_frames, latent_rows in [*((frames, LATENT_ROWS) for frames in LATENT_FRAMES), MEASURED_SIZE]:
        video = _noise(1, 3, latent_frames * plain.temporal_factor, latent_rows * plain.spatial_factor, 16)
        collectives.reset()
        with PeakMemory() as memory:
            latents = shared.encode(video).mean
        worst = max(worst, float((latents - plain.encode(video).mean).abs().max()))
    positions = MEASURED_SIZE[0] if mode == "time" else MEASURED_SIZE[1]
    share = split_sizes(positions, degree)[0] / positions
    return _Measured(worst, _bytes(collectives.snapshot(), HALO), 0, 0, memory.peak_bytes, share)


def _tiled(vae: Any, video: torch.Tensor, factor: int) -> torch.Tensor:
    """The VAE's own blend, with tiles of six latent rows and columns."""
    vae.enable_tiling(tile_sample_min_height=6 * factor, tile_sample_min_width=6 * factor)
    if hasattr(vae, "tile_sample_stride_height"):
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = 4 * factor
    try:
        moments: torch.Tensor = vae._encode(video)
        return moments
    finally:
        vae.disable_tiling()


def _noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(shape[2])) * 2 - 1


def _bytes(sent: dict[str, dict[str, float]], *purposes: str) -> int:
    return sum(int(sent[purpose]["bytes"]) for purpose in purposes if purpose in sent)
