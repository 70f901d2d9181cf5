"""A small encoded dataset, written without videos or encoders."""

from pathlib import Path

import torch

from ttv_train.data.latent_index import LatentIndex, put_index
from ttv_train.data.manifest import (
    DECODE_VERSION,
    FORMAT_VERSION,
    LatentEntry,
    Manifest,
    put_manifest,
)
from ttv_train.data.shards import LatentSample, put_null_prompt, put_shard
from ttv_train.encoders.vae.base import LatentNormalization
from ttv_train.storage import open_store


def make_sample(number: int, *, logvar: bool = True) -> LatentSample:
    """A sample of latents (4, 2, 3, 5) in bfloat16 and 6 tokens of width 8, all keyed by `number`."""
    generator = torch.Generator().manual_seed(number)
    entry = LatentEntry(
        key=f"{number:032x}",
        shard="",
        offset=0,
        length=0,
        sha256="",
        xxh3="",
        source_name=f"clips/{number}.mp4",
        source_sha256=f"{number:064x}",
        clip_index=0,
        is_last_clip=False,
        caption=f"caption “{number}”",
        bucket=(4, 24, 40),
        fps=8.0,
        latent_shape=(4, 2, 3, 5),
        num_text_tokens=4,
        start_seconds=0.5,
    )
    mean, variance = torch.randn(2, 4, 2, 3, 5, generator=generator).bfloat16()
    embeds = torch.randn(6, 8, generator=generator)
    return LatentSample(entry, mean, variance if logvar else None, embeds, torch.arange(6) < 4)


def write_store(folder: Path, samples: list[LatentSample]) -> list[LatentEntry]:
    """Commits `samples` as one shard; returns their entries."""
    store = open_store(str(folder))
    shard, entries = put_shard(store, samples)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        decode_version=DECODE_VERSION,
        fingerprint="settings",
        normalization=LatentNormalization(shift=(0.0,), scale=(0.5, 1.0, 1.5, 2.0)),
        num_samples=len(entries),
        num_quarantined=3,
        null_prompt=put_null_prompt(store, torch.ones(6, 8), torch.arange(6) < 1),
        index=put_index(store, LatentIndex("vae", "text", entries)),
        shards=[shard],
    )
    put_manifest(store, manifest)
    return entries
