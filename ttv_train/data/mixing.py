"""Several encoded datasets as one."""

import hashlib
import logging
from collections.abc import Iterator, Sequence

import torch

from ttv_train.config import LatentsConfig, StorageConfig
from ttv_train.data.shards import LatentEntry, LatentStore, SampleReads, SampleResult
from ttv_train.errors import UserError

logger = logging.getLogger(__name__)


def open_latents(config: LatentsConfig, storage: StorageConfig | None = None) -> "LatentStore | MixedDataset":
    """What `latents.sources` names, or else `latents.path`. Raises UserError if it is absent or damaged."""
    if config.sources:
        return MixedDataset([LatentStore.open(source.path, storage) for source in config.sources])
    return LatentStore.open(config.path, storage)


class MixedDataset(SampleReads):
    """The samples of several latent stores that were made by the same encoders.

    A clip that several stores hold counts for the first of them.

    Raises:
        UserError: two stores were made by different encoders, or one adds nothing to those before it.
    """

    def __init__(self, stores: Sequence[LatentStore]) -> None:
        first = stores[0]
        for store in stores:
            if store.encoders != first.encoders:
                raise UserError(
                    f"latents.sources: {first.path} and {store.path} were encoded with different vae or text_encoder "
                    "settings; encode one of them again with the settings of the other"
                )
        self.path = ", ".join(store.path for store in stores)
        self.fingerprint = hashlib.sha256("\n".join(store.fingerprint for store in stores).encode()).hexdigest()
        self.encoders = first.encoders
        self.normalization = first.normalization
        self.num_quarantined = sum(store.num_quarantined for store in stores)
        self.joins_reads = any(store.joins_reads for store in stores)
        self.stores = stores
        self._source_of: dict[str, int] = {}
        self.entries: list[LatentEntry] = []
        for source, store in enumerate(stores):
            new = [entry for entry in store.entries if entry.key not in self._source_of]
            if not new:
                raise UserError(f"latents.sources {store.path}: earlier sources hold every sample of it; remove it")
            if len(new) < len(store.entries):
                count = len(store.entries) - len(new)
                logger.warning("latents.sources %s: %d samples are in an earlier source as well", store.path, count)
            self._source_of.update((entry.key, source) for entry in new)
            self.entries += new

    def source_of(self, entry: LatentEntry) -> int:
        """Number of the store that holds a sample."""
        return self._source_of[entry.key]

    @property
    def source_paths(self) -> list[str]:
        """Paths of the stores, by their number."""
        return [store.path for store in self.stores]

    def by_store(self, entries: Sequence[LatentEntry]) -> Iterator[tuple[LatentStore, Sequence[LatentEntry]]]:
        """The stores that hold some of `entries`, each with those."""
        for source, store in enumerate(self.stores):
            mine = [entry for entry in entries if self.source_of(entry) == source]
            if mine:
                yield store, mine

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Samples, each as it is or as the CorruptSampleError that its reading ended in."""
        results: dict[str, SampleResult] = {}
        for store, mine in self.by_store(entries):
            results.update(zip((entry.key for entry in mine), store.read_many(mine), strict=True))
        return [results[entry.key] for entry in entries]

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        return self.stores[0].null_prompt()

    def close(self) -> None:
        """See `LatentDataset.close`."""
        for store in self.stores:
            store.close()
