"""How many samples of each bucket make one optimizer step."""

import math
from collections.abc import Iterable, Mapping

from ttv_train.config import TrainingConfig, parse_bucket
from ttv_train.data.manifest import LatentEntry
from ttv_train.data.order import Bucket
from ttv_train.errors import UserError


def latent_positions(entries: Iterable[LatentEntry]) -> dict[Bucket, int]:
    """Frames x height x width of the latents, by bucket."""
    return {entry.bucket: math.prod(entry.latent_shape[1:]) for entry in entries}


def batch_sizes(positions: Mapping[Bucket, int], config: TrainingConfig, data_degree: int) -> dict[Bucket, int]:
    """The samples of a global batch, by bucket: a function of the config and the dataset, not of the number of ranks.

    Args:
        positions: see `latent_positions`.
        config: of the training.
        data_degree: data-parallel ranks.

    Raises:
        UserError: a batch cannot be dealt evenly to `data_degree` ranks.
    """
    named = {parse_bucket(bucket): size for bucket, size in config.bucket_batch_sizes.items()}
    base = config.global_batch_size
    sizes = {}
    for bucket, tokens in positions.items():
        multiple = 1 if config.tokens_per_batch is None else config.tokens_per_batch // (base * tokens)
        sizes[bucket] = named.get(bucket, base * max(multiple, 1))
        if sizes[bucket] % data_degree:
            key, where = "training.global_batch_size", ""
            if bucket in named:
                key, where = "training.bucket_batch_sizes", f" of bucket {'x'.join(map(str, bucket))}"
            raise UserError(
                f"{key} {named.get(bucket, base)}{where} cannot be dealt to {data_degree} data-parallel ranks; make it "
                "a multiple of them, or raise parallel.sequence.degree"
            )
    return sizes
