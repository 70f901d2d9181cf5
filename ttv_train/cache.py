"""What a run will read next, brought near before it starts; and how near it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ttv_train.checkpoint.layout import checkpoint_step, list_checkpoints
from ttv_train.config import RunConfig
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.manifest import storage_is_down
from ttv_train.data.mixing import open_latents
from ttv_train.data.shards import LatentEntry, range_of
from ttv_train.data.training_order import training_order
from ttv_train.errors import UserError
from ttv_train.storage import StoreUnavailableError
from ttv_train.validate import split_holdout

BYTES_AT_ONCE = 64 * 2**20


@dataclass(frozen=True)
class CacheStatus:
    """Where the samples of one encoded dataset are, in bytes."""

    path: str
    samples: int
    total: int
    local: int
    """In `storage.cache_dir` of this node."""
    alluxio: float | None
    """In Alluxio's cache; None where its door does not say, or where there is no Alluxio."""
    nowhere: float | None
    """Neither here nor there; None where that is not known."""
    is_in_alluxio: bool
    """`path` goes through Alluxio, by whichever door."""

    def __str__(self) -> str:
        unknown = "nothing: this path does not go through Alluxio"
        if self.is_in_alluxio:
            unknown = "not known: neither a mount nor the S3 API tells, alluxio:// does; or see the master's web page"
        lines = [
            f"{self.path}: {self.samples} samples, {self._shown(self.total)}",
            f"  on this node   {self._shown(self.local)}",
            f"  in Alluxio     {unknown if self.alluxio is None else self._shown(self.alluxio)}",
            f"  in neither     {'not known' if self.nowhere is None else self._shown(self.nowhere)}",
        ]
        return "\n".join(lines)

    def _shown(self, count: float) -> str:
        return f"{count / 2**20:,.1f} MiB ({count / max(1, self.total):.0%})"


def warm(config: RunConfig, epochs: int) -> str:
    """Loads what the run of `config` reads in its next `epochs`, in the order in which it is needed: into Alluxio with
    load jobs where its door has them, else by reading it; and into `storage.cache_dir`, if that is set. Says what it
    did.

    Raises:
        UserError: the dataset or the storage cannot be read.
    """
    dataset = open_latents(config.latents, config.storage)
    entries = upcoming(config, dataset, epochs)
    total = sum(entry.length for entry in entries)
    failed, submitted = 0, False
    with tqdm(total=total, desc="warm", unit="B", unit_scale=True) as progress:
        for store, mine in dataset.by_store(entries):
            try:
                submitted = store.store.warm(list(dict.fromkeys(entry.shard for entry in mine)))
            except OSError as error:
                raise UserError(f"latents.path {store.path}: {error}; see that Alluxio's master is up") from None
            if submitted and not config.storage.cache_dir:
                progress.update(sum(entry.length for entry in mine))
                continue
            for chunk in _chunks(mine):
                results = store.store.read_many([range_of(entry) for entry in chunk])
                for result in results:
                    if isinstance(result, StoreUnavailableError):
                        raise storage_is_down(result)
                failed += sum(isinstance(result, OSError) for result in results)
                progress.update(sum(entry.length for entry in chunk))
    how = "loaded by Alluxio" if submitted else "read"
    return f"{len(entries)} samples ({total / 2**20:,.1f} MiB) {how}; {failed} could not be read"


def status(config: RunConfig) -> list[CacheStatus]:
    """Where the samples are that the run of `config` reads, by dataset. Raises UserError as `warm` does."""
    dataset = open_latents(config.latents, config.storage)
    result = []
    for store, entries in dataset.by_store(dataset.entries):
        total = sum(entry.length for entry in entries)
        shards = {entry.shard for entry in entries}
        try:
            fractions = {shard: store.store.cached_fraction(shard) for shard in shards}
        except OSError as error:
            raise UserError(f"latents.path {store.path}: {error}") from None
        local = [entry for entry in entries if store.store.holds(entry.sha256)]
        known = {shard: fraction for shard, fraction in fractions.items() if fraction is not None}
        held = {entry.key for entry in local}
        away = [entry for entry in entries if entry.key not in held]
        num_local = sum(entry.length for entry in local)
        has_all = len(known) == len(shards)
        result.append(
            CacheStatus(
                store.path,
                len(entries),
                total,
                num_local,
                sum(entry.length * known[entry.shard] for entry in entries) if has_all else None,
                sum(entry.length * (1 - known[entry.shard]) for entry in away) if has_all or not away else None,
                is_in_alluxio=store.store.tier == "alluxio",
            )
        )
    return result


def upcoming(config: RunConfig, dataset: LatentDataset, epochs: int) -> list[LatentEntry]:
    """What the next epochs after the newest checkpoint read, in order of first use; held-out samples come first."""
    training, held_out = split_holdout(dataset.entries, config.validation, config.seed)
    order = training_order(config, dataset, training, data_degree=1)
    start = max(map(checkpoint_step, list_checkpoints(Path(config.output_dir) / "checkpoints")), default=0)
    stop = min(config.training.steps, start + epochs * order.batches_per_epoch)
    used = (training[index] for step in range(start, stop) for index in order.batch(step).indices)
    return list({entry.key: entry for entry in (*held_out, *used)}.values())


def _chunks(entries: Sequence[LatentEntry]) -> Iterator[list[LatentEntry]]:
    chunk: list[LatentEntry] = []
    size = 0
    for entry in entries:
        if chunk and size + entry.length > BYTES_AT_ONCE:
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry.length
    if chunk:
        yield chunk
