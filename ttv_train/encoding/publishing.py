"""Makes what the workers have encoded the dataset that readers see."""

from dataclasses import replace
from pathlib import Path

from ttv_train.config import RunConfig
from ttv_train.data.latent_index import LatentIndex, put_index
from ttv_train.data.manifest import DECODE_VERSION, FORMAT_VERSION, Manifest, put_manifest
from ttv_train.data.quarantine import STAGES_OF_ENCODING, Quarantine
from ttv_train.data.shards import put_null_prompt
from ttv_train.data.units import RECORDS_FOLDER, read_records
from ttv_train.encoders import dataset_fingerprint
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoding.planning import Plan
from ttv_train.errors import UserError
from ttv_train.storage import Store


def commit(config: RunConfig, store: Store, encoder: ClipEncoder, plan: Plan) -> Manifest | None:
    """Publishes the dataset: index, then manifest; then removes what workers have noted. Any worker may do it; several
    do the same.

    Returns:
        The manifest; None if records of finished units are gone.

    Raises:
        UserError: not one clip could be encoded.
    """
    rejected, shards, found = list(plan.rejected), dict(plan.shards), dict(plan.fresh)
    for record in read_records(store, plan.units):
        if record is None:
            return None
        rejected += record.rejected
        found.update((entry.key, entry) for entry in record.entries)
        if record.shard is not None:
            shards[record.shard.name] = record.shard
    # What is not part of the key may have changed since an entry was written: the file's name, the number of clips.
    entries = [
        replace(found[key], source_name=clip.source.name, clip_index=clip.index, is_last_clip=clip.is_last)
        for key, clip in plan.wanted.items()
        if key in found
    ]
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    # What has been mended since the last time leaves the file; what training has found stays.
    Quarantine(output / "quarantine.jsonl").replace(STAGES_OF_ENCODING, rejected)
    if not entries:
        raise UserError(
            f"dataset.path {config.dataset.path}: no clip could be encoded; {output / 'quarantine.jsonl'} says why"
        )
    used = {entry.shard for entry in entries}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        decode_version=DECODE_VERSION,
        fingerprint=dataset_fingerprint(encoder.visual_fingerprint, encoder.text_encoder, config.dataset),
        normalization=encoder.vae.normalization,
        num_samples=len(entries),
        num_quarantined=len(rejected),
        null_prompt=plan.null_prompt or put_null_prompt(store, *encoder.encode_null_prompt()),
        index=put_index(store, LatentIndex(*encoder.fingerprints, entries)),
        shards=[shards[name] for name in sorted(used)],
    )
    put_manifest(store, manifest)
    store.delete_folder(RECORDS_FOLDER)
    return manifest
