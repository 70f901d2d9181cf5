"""Random latents of the shapes that a config would give, for a dry run before anything is encoded."""

from collections.abc import Sequence

import torch

from ttv_train.config import RunConfig, parse_bucket
from ttv_train.data.shards import LatentEntry, LatentSample, SampleResult
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders.first_frame import FirstFrameEncoder
from ttv_train.encoders.text.base import TextEncoder
from ttv_train.encoders.vae.base import VideoVae
from ttv_train.parallel.rng import keyed_normal


class SyntheticStore:
    """Stands in for a `LatentStore`: as many samples of every bucket as a global batch holds, read at no cost."""

    path = "synthetic"
    num_quarantined = 0
    joins_reads = False

    def __init__(self, config: RunConfig, vae: VideoVae, text_encoder: TextEncoder) -> None:
        self.fingerprint = ""
        self.normalization = vae.normalization
        self._embeds = torch.zeros(text_encoder.max_length, text_encoder.hidden_size)
        self._mask = torch.ones(text_encoder.max_length, dtype=torch.bool)
        self._first_frame = config.first_frame.enabled
        self._embeds_shape: tuple[int, int] | None = None
        if self._first_frame:
            self._embeds_shape = FirstFrameEncoder(config.first_frame, torch.device("cpu")).embeds_shape
        self.entries = []
        for bucket in map(parse_bucket, config.dataset.buckets):
            for number in range(config.training.global_batch_size + 1):
                key = f"synthetic-{'x'.join(map(str, bucket))}-{number}"
                self.entries.append(
                    LatentEntry(
                        key=key,
                        shard="",
                        offset=0,
                        length=0,
                        sha256="",
                        xxh3="",
                        source_name=key,
                        source_sha256=key,
                        clip_index=number,
                        is_last_clip=number == config.training.global_batch_size,
                        caption="",
                        bucket=bucket,
                        fps=config.dataset.fps,
                        latent_shape=vae.latent_shape(*bucket),
                        num_text_tokens=text_encoder.max_length,
                    )
                )

    def read(self, entry: LatentEntry) -> LatentSample:
        """Unit-scale noise in place of latents, keyed by the entry."""
        latents = keyed_normal(entry.latent_shape, "synthetic", entry.key)
        first_frame = None
        if self._first_frame:
            embeds = None if self._embeds_shape is None else torch.zeros(self._embeds_shape)
            first_frame = FirstFrame(latents, embeds)
        return LatentSample(entry, latents, None, self._embeds, self._mask, first_frame)

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """`read`, of several."""
        return [self.read(entry) for entry in entries]

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros (L, D) and a mask (L,) of ones."""
        return self._embeds, self._mask

    def close(self) -> None:
        """See `LatentDataset.close`; reading takes no time."""
