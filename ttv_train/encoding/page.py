"""The page of `ttv-train encode --page`: previews of decoded latents beside their sources, PSNR, statistics of latents
per channel, and outliers."""

import base64
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ttv_train import pages
from ttv_train.config import DatasetConfig
from ttv_train.data.cut import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import BadVideoError
from ttv_train.data.shards import LatentEntry, LatentStore
from ttv_train.encoders.vae import VideoVae
from ttv_train.monitor.video import write_video

PREVIEWS = 8
MEASURED = 256
"""Samples whose statistics are taken."""
OUTLIER_SIGMAS = 6.0
FEWEST_FOR_OUTLIERS = 8
"""Among fewer samples none is far from the others."""


@dataclass(frozen=True)
class Preview:
    """One clip and what its latents decode to."""

    name: str
    caption: str
    psnr: float
    """In dB, of the decoded clip against the frames that were encoded."""
    mp4: str
    """The source at the left, the decoded latents at the right, in base64."""


@dataclass(frozen=True)
class Statistics:
    """Of normalized latents."""

    means: list[float]
    """Per channel."""
    stds: list[float]
    outliers: list[tuple[str, float, float]]
    """Name, mean and standard deviation of samples that are far from the others."""


def write_page(
    path: Path,
    store: LatentStore,
    clips: Mapping[str, Clip],
    config: DatasetConfig,
    vae: VideoVae,
    device: torch.device,
    summary: str,
) -> Path:
    """Writes the page about a committed dataset.

    Args:
        path: the file.
        store: the dataset.
        clips: its clips by key; those that are not there give no preview.
        config: of the clips.
        vae: decodes the latents, on `device`.
        device: of the VAE.
        summary: lines about the job.
    """
    return pages.write_page(
        path,
        "encoding.html",
        name=store.path,
        summary=summary,
        previews=make_previews(store, clips, config, vae, device),
        statistics=measure(store),
        measured=min(MEASURED, len(store.entries)),
    )


def make_previews(
    store: LatentStore, clips: Mapping[str, Clip], config: DatasetConfig, vae: VideoVae, device: torch.device
) -> list[Preview]:
    """Previews of samples spread over the dataset. A clip that cannot be decoded any more has none."""
    previews = []
    with ClipDecoder(config) as decoder:
        for entry in spread([entry for entry in store.entries if entry.key in clips], PREVIEWS):
            try:
                source = decoder.decode(clips[entry.key])
            except BadVideoError:
                continue
            decoded = vae.decode(store.read(entry).mean[None].to(device)).float().cpu()[0].permute(1, 2, 3, 0)
            frames = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte()
            pair = torch.cat([source, frames], dim=2)
            previews.append(Preview(entry.source_name, entry.caption, psnr(source, frames), _mp4(pair, entry.fps)))
    return previews


def psnr(first: torch.Tensor, second: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two uint8 videos of one shape."""
    error = (first.double() - second.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def measure(store: LatentStore) -> Statistics:
    """Statistics of samples spread over the dataset, with their normalization applied."""
    entries = spread(store.entries, MEASURED)
    moments = []
    for entry in entries:
        latents = store.normalization.normalize(store.read(entry).mean[None].float())[0].flatten(1).double()
        moments.append(torch.stack([latents.mean(1), latents.square().mean(1)]))
    per_sample = torch.stack(moments)  # (samples, 2, C)
    mean, square = per_sample.mean(0)
    stds = (square - mean.square()).clamp(min=0).sqrt()
    sample_means = per_sample[:, 0].mean(1)
    sample_stds = (per_sample[:, 1].mean(1) - sample_means.square()).clamp(min=0).sqrt()
    far = _is_far(sample_means) | _is_far(sample_stds)
    outliers = [
        (entry.source_name, float(sample_means[row]), float(sample_stds[row]))
        for row, entry in enumerate(entries)
        if far[row]
    ]
    return Statistics(mean.tolist(), stds.tolist(), outliers)


def spread(entries: Sequence[LatentEntry], count: int) -> list[LatentEntry]:
    """At most `count` of the entries, evenly spread from the first on."""
    step = max(1, math.ceil(len(entries) / count))
    return list(entries[::step])


def _is_far(values: torch.Tensor) -> torch.Tensor:
    """Of each value, whether it is far from the median, measured in median absolute deviations, which few outliers do
    not move (1.4826 of them are a standard deviation of normal values)."""
    if len(values) < FEWEST_FOR_OUTLIERS:
        return torch.zeros_like(values, dtype=torch.bool)
    deviations = (values - values.median()).abs()
    return deviations > OUTLIER_SIGMAS * 1.4826 * deviations.median() + 1e-9


def _mp4(frames: torch.Tensor, fps: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return base64.b64encode(write_video(Path(folder) / "pair.mp4", frames, fps).read_bytes()).decode()
