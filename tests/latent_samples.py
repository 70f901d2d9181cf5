"""A latent dataset in memory, for tests of what reads one."""

from collections.abc import Sequence

import torch

from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentNormalization, LatentSample, SampleResult
from ttv_train.parallel.rng import keyed_normal

BUCKET = (4, 32, 48)
SHAPE = (3, 2, 4, 6)


def make_entry(number: int, bucket: tuple[int, int, int] = BUCKET, **fields) -> LatentEntry:
    """Entry `number` of a dataset whose every video gives one clip."""
    values = {
        "key": f"sample-{number}",
        "shard": "shards/one.tar",
        "offset": 0,
        "length": 0,
        "sha256": "",
        "xxh3": "",
        "source_name": f"{number}.mp4",
        "source_sha256": f"digest-{number}",
        "clip_index": 0,
        "is_last_clip": False,
        "caption": f"caption {number}",
        "bucket": bucket,
        "fps": 8.0,
        "latent_shape": SHAPE,
        "num_text_tokens": 3,
    }
    return LatentEntry(**(values | fields))


class MemoryDataset:
    """Samples keyed by their entry. Those whose key is in `corrupt` cannot be read; `reads` counts the attempts."""

    path = "memory"
    fingerprint = ""
    joins_reads = True
    num_quarantined = 0
    normalization = LatentNormalization(shift=(1.0,), scale=(2.0,))

    def __init__(self, entries: list[LatentEntry], corrupt: tuple[str, ...] = (), logvar: float | None = None) -> None:
        self.entries, self.corrupt, self.logvar = entries, corrupt, logvar
        self.reads: list[str] = []

    def read(self, entry: LatentEntry) -> LatentSample:
        self.reads.append(entry.key)
        if entry.key in self.corrupt:
            raise CorruptSampleError(entry.key, entry.shard, "flipped on purpose")
        mean = keyed_normal(entry.latent_shape, "mean", entry.key)
        logvar = None if self.logvar is None else torch.full_like(mean, self.logvar)
        embeds = keyed_normal((entry.num_text_tokens, 5), "prompt", entry.key)
        return LatentSample(entry, mean, logvar, embeds, torch.ones(entry.num_text_tokens, dtype=torch.bool))

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        return [self._read_or_error(entry) for entry in entries]

    def _read_or_error(self, entry: LatentEntry) -> SampleResult:
        try:
            return self.read(entry)
        except CorruptSampleError as error:
            return error

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1, 5), -1.0), torch.ones(1, dtype=torch.bool)

    def close(self) -> None:
        pass
