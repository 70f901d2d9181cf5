"""What the trainer needs of an encoded dataset."""

from typing import Protocol

import torch

from ttv_train.data.shards import LatentEntry, LatentNormalization, LatentSample


class LatentDataset(Protocol):
    """Encoded clips, read one at a time from any thread."""

    path: str
    fingerprint: str
    """Of the settings that it was encoded with."""
    normalization: LatentNormalization
    """To be applied to every sample's latents."""
    num_quarantined: int
    """Clips and files that were left out."""
    entries: list[LatentEntry]

    def read(self, entry: LatentEntry) -> LatentSample:
        """One sample, verified. Raises CorruptSampleError."""
        ...

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        ...
