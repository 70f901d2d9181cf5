"""The order in which a run takes its training samples."""

import hashlib
from collections.abc import Sequence

from ttv_train.config import RunConfig
from ttv_train.data.batching import batch_sizes, latent_positions
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.mixing import MixedDataset
from ttv_train.data.order import DataOrder
from ttv_train.data.shards import LatentEntry


def dataset_digest(entries: Sequence[LatentEntry]) -> str:
    """SHA-256 over the keys of the training set: with the seed and the batch size it decides the data order."""
    return hashlib.sha256("\n".join(entry.key for entry in entries).encode()).hexdigest()


def training_order(
    config: RunConfig, dataset: LatentDataset, entries: Sequence[LatentEntry], data_degree: int
) -> DataOrder:
    """The global batches of a run.

    Args:
        dataset: that `entries` are of.
        entries: the training set, without what is held out.
        data_degree: ranks on the data axis. It does not change the order.

    Raises:
        UserError: a batch cannot be dealt to so many ranks, or the order would be empty.
    """
    mixed = dataset if isinstance(dataset, MixedDataset) else None
    return DataOrder(
        [entry.bucket for entry in entries],
        seed=config.seed,
        digest=dataset_digest(entries),
        global_batch_size=config.training.global_batch_size,
        batch_sizes=batch_sizes(latent_positions(entries), config.training, data_degree),
        tail=config.training.tail,
        sources=[mixed.source_of(entry) for entry in entries] if mixed is not None else None,
        weights=[source.weight for source in config.latents.sources] if mixed is not None else None,
    )
