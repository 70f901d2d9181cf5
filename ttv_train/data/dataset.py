"""What the trainer needs of an encoded dataset."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ttv_train.data.shards import LatentEntry, LatentNormalization, LatentSample, SampleResult

__all__ = ["LatentDataset", "SampleResult"]


class LatentDataset(Protocol):
    """Encoded clips, read one at a time from any thread."""

    path: str
    fingerprint: str
    """Of the settings that it was encoded with."""
    normalization: LatentNormalization
    """To be applied to every sample's latents."""
    num_quarantined: int
    """Clips and files that were left out."""
    joins_reads: bool
    """Whether samples that lie side by side are read with one request, so that it pays to ask for many at once."""

    @property
    def entries(self) -> Sequence[LatentEntry]:
        """The samples, in the order of the dataset."""
        ...

    def read(self, entry: LatentEntry) -> LatentSample:
        """One sample, verified. Raises CorruptSampleError."""
        ...

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Samples in the order asked for, each as it is or as the CorruptSampleError that its reading ended in."""
        ...

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        ...

    def close(self) -> None:
        """Ends the reads that are under way, as soon as may be and with an error; there are none after it."""
        ...
