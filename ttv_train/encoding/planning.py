"""What an encoding job has to do: the dataset's clips, less what an earlier job has committed and is fresh."""

from dataclasses import dataclass
from pathlib import Path

from ttv_train.checkpoint.lock import wait_for_lock
from ttv_train.config import RunConfig, parse_bucket
from ttv_train.data.changed_sources import DATASET_MANIFEST
from ttv_train.data.cut import Clip
from ttv_train.data.keyed_clips import list_keyed_clips
from ttv_train.data.latent_index import read_index
from ttv_train.data.manifest import (
    DamagedStoreError,
    LatentEntry,
    StoredObject,
    is_intact,
    read_manifest,
    stored_objects,
)
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.units import WorkUnit, plan_units, read_records
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.storage import Store

SCAN_LOCK = ".scan.lock"


@dataclass(frozen=True)
class Plan:
    """What there is and what is to be done, the same on every rank."""

    wanted: dict[str, Clip]
    """Every clip of the dataset by its key, in the order of the dataset."""
    fresh: dict[str, LatentEntry]
    """Those that the last committed manifest holds."""
    units: list[WorkUnit]
    """The others."""
    pending: list[WorkUnit]
    """Units that no earlier, killed job has finished."""
    shards: dict[str, StoredObject]
    """Shards of the last committed manifest by name."""
    null_prompt: StoredObject | None
    """Embedding of the empty prompt of the last committed manifest, unless it is of another text encoder."""
    rejected: list[QuarantineRow]
    """Files and clips that were left out before decoding."""


def make_plan(config: RunConfig, store: Store, encoder: ClipEncoder) -> Plan:
    """Compares the dataset's clips with what is stored.

    Raises:
        UserError: a bucket does not suit the VAE, or the dataset cannot be read.
    """
    for bucket in config.dataset.buckets:
        encoder.vae.latent_shape(*parse_bucket(bucket))
    store.remove_partial_files()
    output = Path(config.output_dir)
    with wait_for_lock(output / SCAN_LOCK):  # the next worker reads the manifest instead of the videos
        wanted, rejected = list_keyed_clips(config.dataset, encoder, output / DATASET_MANIFEST)
    fresh, shards, null_prompt = committed(store, wanted, encoder.text_encoder.fingerprint)
    units = plan_units(
        wanted,
        fresh,
        samples_per_shard=config.latents.samples_per_shard,
        shard_bytes=config.latents.shard_mib * 2**20,
        sample_bytes=encoder.sample_bytes,
    )
    pending = [unit for unit, record in zip(units, read_records(store, units), strict=True) if record is None]
    return Plan(wanted, fresh, units, pending, shards, null_prompt, rejected)


def committed(
    store: Store, wanted: dict[str, Clip], text_encoder_fingerprint: str
) -> tuple[dict[str, LatentEntry], dict[str, StoredObject], StoredObject | None]:
    """What can be kept of the last committed manifest: `fresh`, `shards` and `null_prompt` of a plan."""
    try:
        manifest, _ = read_manifest(store)
        index = read_index(store, manifest)
    except DamagedStoreError:
        return {}, {}, None
    shards = {shard.name: shard for shard in stored_objects(store, manifest.shards)}
    fresh = {entry.key: entry for entry in index.entries if entry.key in wanted and entry.shard in shards}
    same_text_encoder = index.text_encoder_fingerprint == text_encoder_fingerprint
    keeps_null_prompt = same_text_encoder and is_intact(store, manifest.null_prompt)
    return fresh, shards, manifest.null_prompt if keeps_null_prompt else None
