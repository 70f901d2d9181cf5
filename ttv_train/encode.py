"""The encoding job, top to bottom: plan, encode unit by unit, commit.

Clips and captions become latent shards. What an earlier job has committed is kept where it is fresh; stale samples
leave the manifest. Killed at any moment and run again, on any number of ranks, the job ends with the same bytes.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from ttv_train.checkpoint.lock import lock_run_folder
from ttv_train.config import RunConfig, parse_bucket
from ttv_train.data.clips import Clip, list_clips
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.manifest import (
    DECODE_VERSION,
    FORMAT_VERSION,
    DamagedStoreError,
    LatentEntry,
    LatentIndex,
    Manifest,
    StoredObject,
    is_intact,
    is_stored,
    put_index,
    put_manifest,
    read_index,
    read_manifest,
)
from ttv_train.data.probe import BadVideoError
from ttv_train.data.quarantine import Quarantine, QuarantineRow
from ttv_train.data.shards import LatentSample, put_null_prompt, put_shard
from ttv_train.data.units import RECORDS_FOLDER, UnitRecord, WorkUnit, clip_key, plan_units, put_record, read_record
from ttv_train.devices import get_backend
from ttv_train.encoders import dataset_fingerprint
from ttv_train.encoders.clip_encoder import ClipEncoder, EncodedClip, NonFiniteError
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank, world_rank, world_size
from ttv_train.parallel.mesh import distributed
from ttv_train.storage import Store, open_store

logger = logging.getLogger(__name__)

DATASET_MANIFEST = "dataset.parquet"
"""In the output folder; from it a rerun knows the videos that have not changed."""
LONGEST_WAIT = timedelta(days=30)
"""Ranks meet only before and after the work, so the first one to finish may wait as long as the job lasts."""
MAX_PIXELS_PER_BATCH = 49 * 480 * 720
"""Small clips go through the VAE together, up to as many pixels as one clip of CogVideoX has."""


@dataclass(frozen=True)
class EncodeSummary:
    """What an encoding job came to."""

    encoded: int
    """Clips that this call encoded."""
    reused: int
    """Clips that were encoded before and are fresh."""
    quarantined: int
    """Files and clips that were left out."""
    encoded_in_float32: int
    """Encodings that overflowed in the encoder's own type and were repeated."""
    frames: int
    """Frames that this call encoded."""
    shards: int
    """Shards of the committed dataset."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"encoded {self.encoded} clips ({self.frames} frames) in {self.seconds:.1f} s, reused {self.reused}, "
            f"quarantined {self.quarantined}; {self.encoded + self.reused} samples in {self.shards} shards"
        )


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


def run(config: RunConfig) -> EncodeSummary:
    """Encodes the dataset of `config`, as one process or as a rank of a launcher's process group.

    Raises:
        UserError: on every rank, for anything wrong with the config, the dataset or the store.
    """
    with (
        distributed(get_backend(config.device.backend), LONGEST_WAIT.total_seconds()) as device,
        lock_run_folder(Path(config.output_dir)),
    ):
        return encode_dataset(config, device)


def encode_dataset(config: RunConfig, device: torch.device) -> EncodeSummary:
    """`run` inside a process group, if there is one."""
    started = time.monotonic()
    if not config.latents.path:
        raise UserError("latents.path is not set; name the folder or URL that the encoded dataset goes to")
    store = open_store(config.latents.path, config.storage)
    encoder = ClipEncoder(config.vae, config.text_encoder, device, config.first_frame)
    plan = on_main_rank(lambda: make_plan(config, store, encoder))
    mine = plan.pending[world_rank() :: world_size()]
    num_float32 = sum(on_all_ranks(lambda: encode_units(config, store, encoder, mine)))
    return on_main_rank(lambda: commit(config, store, encoder, plan, num_float32, started))


def make_plan(config: RunConfig, store: Store, encoder: ClipEncoder) -> Plan:
    """Compares the dataset's clips with what is stored.

    Raises:
        UserError: a bucket does not suit the VAE, or the dataset cannot be read.
    """
    for bucket in config.dataset.buckets:
        encoder.vae.latent_shape(*parse_bucket(bucket))
    store.remove_partial_files()
    clips, rejected = list_clips(
        config.dataset, encoder.vae.valid_num_frames, manifest=Path(config.output_dir) / DATASET_MANIFEST
    )
    wanted: dict[str, Clip] = {}
    for clip in clips:
        key = clip_key(
            clip,
            decoder=config.dataset.decoder,
            vae_fingerprint=encoder.visual_fingerprint,
            text_encoder_fingerprint=encoder.text_encoder.fingerprint,
        )
        if key in wanted:
            reason = f"same content and caption as {wanted[key].source.name}"
            rejected.append(QuarantineRow(name=clip.source.name, reason=reason, stage="encode"))
        else:
            wanted[key] = clip
    fresh, shards, null_prompt = committed(store, wanted, encoder.text_encoder.fingerprint)
    units = plan_units(wanted, fresh, config.latents.samples_per_shard)
    pending = [unit for unit in units if read_record(store, unit) is None]
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
    shards = {shard.name: shard for shard in manifest.shards if is_stored(store, shard)}
    fresh = {entry.key: entry for entry in index.entries if entry.key in wanted and entry.shard in shards}
    same_text_encoder = index.text_encoder_fingerprint == text_encoder_fingerprint
    keeps_null_prompt = same_text_encoder and is_intact(store, manifest.null_prompt)
    return fresh, shards, manifest.null_prompt if keeps_null_prompt else None


def encode_units(config: RunConfig, store: Store, encoder: ClipEncoder, units: Sequence[WorkUnit]) -> int:
    """Encodes this rank's units; returns how many encodings were repeated in float32."""
    if not units:
        return 0
    total = sum(len(unit.clips) for unit in units)
    label = "encode" if world_size() == 1 else f"encode (rank 0 of {world_size()})"
    frames = 0
    with (
        ClipDecoder(config.dataset) as decoder,
        tqdm(total=total, desc=label, unit="clip", disable=world_rank() != 0) as progress,
    ):
        started = time.monotonic()
        for unit in units:
            samples: list[LatentSample] = []
            rejected: list[QuarantineRow] = []
            for batch in decode_batches(decoder, unit, rejected):
                samples += encode_batch(encoder, batch, rejected)
                frames += sum(clip.bucket[0] for _, clip, _ in batch)
                progress.set_postfix_str(f"{frames / (time.monotonic() - started):.1f} frames/s", refresh=False)
                progress.update(len(batch))
            shard, entries = put_shard(store, samples) if samples else (None, [])
            put_record(store, unit, UnitRecord(shard, entries, rejected))
            progress.update(sum(row.stage == "decode" for row in rejected))
    return encoder.num_float32


DecodedClip = tuple[str, Clip, torch.Tensor]


def decode_batches(decoder: ClipDecoder, unit: WorkUnit, rejected: list[QuarantineRow]) -> Iterator[list[DecodedClip]]:
    """Batches of a unit's clips, each of one bucket. Clips that cannot be decoded are added to `rejected`."""
    batch: list[DecodedClip] = []
    for key, clip in unit.clips:
        frames, height, width = clip.bucket
        if batch and (
            batch[0][1].bucket != clip.bucket or (len(batch) + 1) * frames * height * width > MAX_PIXELS_PER_BATCH
        ):
            yield batch
            batch = []
        try:
            batch.append((key, clip, decoder.decode(clip)))
        except BadVideoError as error:
            rejected.append(QuarantineRow(name=clip.source.name, reason=str(error), stage="decode"))
    if batch:
        yield batch


def encode_batch(
    encoder: ClipEncoder, batch: Sequence[DecodedClip], rejected: list[QuarantineRow]
) -> list[LatentSample]:
    """Samples of a batch of clips. Clips that cannot be encoded are added to `rejected`."""
    encodings = encoder.encode([video for _, _, video in batch], [clip.source.caption for _, clip, _ in batch])
    samples = []
    for (key, clip, _), encoded in zip(batch, encodings, strict=True):
        if isinstance(encoded, NonFiniteError):
            rejected.append(QuarantineRow(name=clip.source.name, reason=str(encoded), stage="encode"))
        else:
            samples.append(make_sample(key, clip, encoded))
    return samples


def make_sample(key: str, clip: Clip, encoded: EncodedClip) -> LatentSample:
    """An encoded clip with its description; its place in a shard is not known yet."""
    C, t, h, w = encoded.mean.shape
    entry = LatentEntry(
        key=key,
        shard="",
        offset=0,
        length=0,
        sha256="",
        source_name=clip.source.name,
        source_sha256=clip.source_sha256,
        clip_index=clip.index,
        is_last_clip=clip.is_last,
        caption=clip.source.caption,
        bucket=clip.bucket,
        fps=clip.fps,
        latent_shape=(C, t, h, w),
        num_text_tokens=int(encoded.prompt_mask.sum()),
        start_seconds=clip.start_seconds,
    )
    return LatentSample(
        entry, encoded.mean, encoded.logvar, encoded.prompt_embeds, encoded.prompt_mask, encoded.first_frame
    )


def commit(
    config: RunConfig, store: Store, encoder: ClipEncoder, plan: Plan, num_float32: int, started: float
) -> EncodeSummary:
    """Publishes the dataset: index, then manifest; then removes the records of the units.

    Raises:
        UserError: not one clip could be encoded, or another job has removed the records of this one.
    """
    rejected, shards, found = list(plan.rejected), dict(plan.shards), dict(plan.fresh)
    for unit in plan.units:
        record = read_record(store, unit)
        if record is None:
            raise UserError(
                f"latents.path {store.url}: {unit.record_name} is gone; another encoding job has finished there: start "
                "this one again, it goes on from where it is"
            )
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
    Quarantine(output / "quarantine.jsonl").replace(("list", "probe", "decode", "encode"), rejected)
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
        num_quarantined=len(rejected),
        null_prompt=plan.null_prompt or put_null_prompt(store, *encoder.encode_null_prompt()),
        index=put_index(store, LatentIndex(encoder.visual_fingerprint, encoder.text_encoder.fingerprint, entries)),
        shards=[shards[name] for name in sorted(used)],
    )
    put_manifest(store, manifest)
    store.delete_folder(RECORDS_FOLDER)
    encoded = {key for unit in plan.pending for key, _ in unit.clips if key in found}
    return EncodeSummary(
        encoded=len(encoded),
        reused=len(entries) - len(encoded),
        quarantined=len(rejected),
        encoded_in_float32=num_float32,
        frames=sum(plan.wanted[key].bucket[0] for key in encoded),
        shards=len(used),
        seconds=time.monotonic() - started,
    )
