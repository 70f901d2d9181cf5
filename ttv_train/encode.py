"""The encoding job, top to bottom: plan, encode unit by unit, commit.

Clips and captions become latent shards. What an earlier job has committed is kept where it is fresh; stale samples
leave the manifest. Any number of workers share the job, see `encoding.leases`. Killed at any moment and run again, the
job ends with the same bytes.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ttv_train.checkpoint.lock import lock_run_folder
from ttv_train.config import RunConfig
from ttv_train.data.changed_sources import DATASET_MANIFEST
from ttv_train.data.clips import Clip
from ttv_train.data.dataset_manifest import is_final_scan
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.keyed_clips import entry_of, sample_of
from ttv_train.data.manifest import DamagedStoreError, Manifest, read_manifest, storage_is_down
from ttv_train.data.probe import BadVideoError
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.shards import CorruptSampleError, LatentSample, LatentStore
from ttv_train.devices import get_backend
from ttv_train.encoders.clip_encoder import ClipEncoder, NonFiniteError
from ttv_train.encoders.followers import EncodingGroup, encoding_group
from ttv_train.encoding.claims import Claims
from ttv_train.encoding.decoding import DecodeAhead, DecodeResult
from ttv_train.encoding.exporting import export_dataset
from ttv_train.encoding.housekeeping import Status, collect_garbage, progress_of
from ttv_train.encoding.leases import Leases
from ttv_train.encoding.page import write_page
from ttv_train.encoding.planning import Plan, make_plan
from ttv_train.encoding.progress import EncodeProgress
from ttv_train.encoding.publishing import commit
from ttv_train.encoding.stopping import StopSignal
from ttv_train.encoding.unchanged import finished_before, forget_finished, note_finished, state_of
from ttv_train.encoding.writing import ShardWriter
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank, world_rank, world_size
from ttv_train.parallel.mesh import distributed
from ttv_train.parallel.messages import LONGEST_WAIT
from ttv_train.storage import Store, open_store

logger = logging.getLogger(__name__)

MOST_DECODE_WORKERS = 8


@dataclass(frozen=True)
class EncodeSummary:
    """What an encoding job came to."""

    encoded: int
    """Clips that this call encoded, on all its ranks."""
    reused: int
    """Clips that were encoded before and are fresh, or that other workers encoded meanwhile."""
    quarantined: int
    """Files and clips that were left out."""
    encoded_in_float32: int
    """Encodings that overflowed in the encoder's own type and were repeated."""
    frames: int
    """Frames that this call encoded."""
    device_busy: float
    """Part of the time during which the device was encoding, from the first batch to the last; the ranks' mean."""
    shards: int
    """Shards of the committed dataset."""
    seconds: float

    def __str__(self) -> str:
        rate = f", {self.frames / self.seconds:.1f} frames/s, device busy {self.device_busy:.0%}" if self.frames else ""
        return (
            f"encoded {self.encoded} clips ({self.frames} frames) in {self.seconds:.1f} s{rate}, reused {self.reused}, "
            f"quarantined {self.quarantined}; {self.encoded + self.reused} samples in {self.shards} shards"
        )


@dataclass(frozen=True)
class Tally:
    """What one worker did."""

    clips: int = 0
    frames: int = 0
    encoded_in_float32: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0
    """From its first batch to its last."""
    is_stopped: bool = False
    """It was asked to stop and has given back what it had not finished."""


def run(config: RunConfig) -> EncodeSummary | None:
    """Encodes the dataset of `config`, as one process, as a rank of a launcher's process group, or as one of several
    workers that know nothing of each other and share `latents.path`.

    Returns:
        What it came to; None if the job was stopped by SIGTERM: the next one goes on from there.

    Raises:
        UserError: on every rank, for anything wrong with the config, the dataset or the store.
    """
    with (
        # Ranks meet only before and after the work, so the first one to finish may wait as long as the job lasts.
        distributed(get_backend(config.device.backend), LONGEST_WAIT.total_seconds()) as device,
        lock_run_folder(Path(config.output_dir), shared=True),
    ):
        try:
            return encode_dataset(config, device)
        except OSError as error:
            where = f"{config.latents.path}: {error}"
            raise storage_is_down(where, "the job goes on from where it is") from error


def status(config: RunConfig) -> Status:
    """How far the job of `config` is, on this machine or on others. Raises UserError as `run` does."""
    store, encoder = open_parts(config, torch.device("cpu"))
    return status_of(config, store, make_plan(config, store, encoder))


def status_of(config: RunConfig, store: Store, plan: Plan) -> Status:
    """`status` of a job whose plan is made."""
    try:
        committed_samples = read_manifest(store)[0].num_samples
    except DamagedStoreError:
        committed_samples = 0
    finished, workers, rate = progress_of(store, plan.units, config.encoding.lease_seconds)
    return Status(
        wanted=len(plan.wanted),
        committed=len(plan.fresh),
        finished=finished,
        stale=committed_samples - len(plan.fresh),
        quarantined=len(plan.rejected),
        workers=workers,
        clips_per_second=rate,
    )


def remove_garbage(config: RunConfig) -> str:
    """Removes what nothing in the store of `config` refers to; says how much. Raises UserError as `run` does."""
    if not config.latents.path:
        raise UserError("latents.path is not set; name the folder or URL of the encoded dataset")
    store = open_store(config.latents.path, config.storage)
    removed, total = collect_garbage(store, config.encoding.garbage_hours * 3600)
    return f"removed {removed} of {total} objects of {config.latents.path}"


def write_preview_page(config: RunConfig) -> Path:
    """Writes `encoding.html` in the output folder: what the committed dataset of `config` decodes to. Raises UserError
    as `run` does."""
    device = get_backend(config.device.backend).device(0)
    store, encoder = open_parts(config, device)
    plan = make_plan(config, store, encoder)
    latents = LatentStore.open(config.latents.path, config.storage)
    clips = {key: plan.wanted[key] for key in plan.fresh}
    summary = str(status_of(config, store, plan))
    path = Path(config.output_dir) / "encoding.html"
    return write_page(path, latents, clips, config.dataset, encoder.vae, device, summary)


def export(config: RunConfig, folder: Path, layout: str) -> str:
    """Writes the encoded dataset of `config` for other trainers; see `export_dataset`. Says what it wrote."""
    store = LatentStore.open(config.latents.path, config.storage)
    try:
        count = export_dataset(store, folder, layout)
    except CorruptSampleError as error:
        raise UserError(f"latents.path {config.latents.path}: {error}; remove the shard and encode again") from None
    return f"wrote {len(store.entries)} samples to {count} files in {folder}"


def open_parts(
    config: RunConfig, device: torch.device, group: EncodingGroup | None = None
) -> tuple[Store, ClipEncoder]:
    """The store and the encoders, whose weights are not loaded yet; the ranks of `group` encode each clip together."""
    if not config.latents.path:
        raise UserError("latents.path is not set; name the folder or URL that the encoded dataset goes to")
    store = open_store(config.latents.path, config.storage)
    return store, ClipEncoder(config.vae, config.text_encoder, device, config.first_frame, group)


def encode_dataset(config: RunConfig, device: torch.device) -> EncodeSummary | None:
    """`run` inside a process group, if there is one."""
    started = time.monotonic()
    store, encoder = open_parts(config, device, encoding_group(config.vae.parallel.degree))
    output = Path(config.output_dir)
    state = on_main_rank(partial(state_of, config.dataset, encoder.fingerprints))
    manifest = on_main_rank(partial(finished_before, output, store, state))
    if manifest is not None:
        return summarize(manifest, [], time.monotonic() - started)
    tallies: list[Tally] = []
    while True:
        plan = on_main_rank(partial(make_plan, config, store, encoder))
        tallies += on_all_ranks(partial(encode_or_follow, config, store, encoder, plan))
        if any(tally.is_stopped for tally in tallies):
            logger.info("stopped by SIGTERM; the same command goes on from there")
            return None
        manifest = on_main_rank(partial(commit, config, store, encoder, plan))
        if manifest is not None:
            break
        # Another worker has committed meanwhile and removed the records: what it committed is fresh now.
    on_main_rank(partial(note_if_final, output, store, state, plan, manifest))
    return summarize(manifest, tallies, time.monotonic() - started)


def note_if_final(output: Path, store: Store, state: str, plan: Plan, manifest: Manifest) -> None:
    """Notes that there is nothing to do for this state, unless a clip or a file has failed that may not fail again."""
    if manifest.num_samples == len(plan.wanted) and is_final_scan(output / DATASET_MANIFEST):
        note_finished(output, store, state)
    else:
        forget_finished(output)


def encode_or_follow(config: RunConfig, store: Store, encoder: ClipEncoder, plan: Plan) -> Tally:
    """`encode_units`, or sharing the work of the rank that does so."""
    if encoder.is_follower:
        # The leader gets the same signal and ends this when its clip is done.
        with StopSignal(before_exit=lambda: None):
            encoder.follow()
        return Tally()
    try:
        return encode_units(config, store, encoder, plan)
    finally:
        encoder.dismiss_followers()


def encode_units(config: RunConfig, store: Store, encoder: ClipEncoder, plan: Plan) -> Tally:
    """Encodes units of the plan until all are finished, by this worker or by others."""
    if not plan.pending:
        return Tally()
    total = sum(len(unit.clips) for unit in plan.pending)
    label = "encode" if world_size() == 1 else f"encode (rank 0 of {world_size()})"
    settings = config.encoding
    with (
        Leases(store, f"{plan.pending[0].folder}/leases", settings.lease_seconds) as leases,
        StopSignal(before_exit=leases.release_all) as stop,
        EncodeProgress(total, label, is_shown=world_rank() == 0) as progress,
        ShardWriter(store, on_written=lambda unit: leases.drop(unit.name)) as writer,
    ):
        claims = Claims(
            store,
            plan.pending,
            leases,
            stop=lambda: stop.is_requested,
            on_done=lambda unit: progress.skip(len(unit.clips)),
        )
        workers = settings.decode_workers or default_decode_workers()
        with DecodeAhead(config.dataset, claims, workers, settings.prefetch_batches, ClipDecoder) as batches:
            samples: list[LatentSample] = []
            rejected: list[QuarantineRow] = []
            for batch in batches:
                if stop.is_requested:
                    break
                results = batch.results()
                with progress.encoding():
                    encoded = encode_batch(encoder, batch.clips, results, rejected)
                progress.add(len(encoded), sum(sample.entry.bucket[0] for sample in encoded))
                progress.skip(len(results) - len(encoded))
                samples += encoded
                leases.clips_per_second = progress.clips / (progress.seconds or 1.0)
                if batch.is_last:
                    writer.write(batch.unit, samples, rejected)
                    claims.note_encoded(batch.unit)
                    samples, rejected = [], []
    return Tally(
        clips=progress.clips,
        frames=progress.frames,
        encoded_in_float32=encoder.num_float32,
        busy_seconds=progress.busy_seconds,
        seconds=progress.seconds,
        is_stopped=stop.is_requested,
    )


def default_decode_workers() -> int:
    """One core is for the encoder."""
    return max(1, min(MOST_DECODE_WORKERS, len(os.sched_getaffinity(0)) - 1))


def encode_batch(
    encoder: ClipEncoder,
    clips: Sequence[tuple[str, Clip]],
    videos: Sequence[DecodeResult],
    rejected: list[QuarantineRow],
) -> list[LatentSample]:
    """Samples of clips of one bucket. Those that could not be decoded or cannot be encoded are added to `rejected`."""
    decoded: list[tuple[str, Clip, torch.Tensor]] = []
    for (key, clip), video in zip(clips, videos, strict=True):
        if isinstance(video, BadVideoError):
            rejected.append(QuarantineRow(name=clip.source.name, reason=str(video), stage="decode"))
        else:
            decoded.append((key, clip, video))
    if not decoded:
        return []
    encodings = encoder.encode([video for _, _, video in decoded], [clip.source.caption for _, clip, _ in decoded])
    samples = []
    for (key, clip, _), encoded in zip(decoded, encodings, strict=True):
        if isinstance(encoded, NonFiniteError):
            rejected.append(QuarantineRow(name=clip.source.name, reason=str(encoded), stage="encode"))
        else:
            entry = replace(entry_of(key, clip, encoder), shard="", num_text_tokens=int(encoded.prompt_mask.sum()))
            samples.append(sample_of(entry, encoded))
    return samples


def summarize(manifest: Manifest, tallies: Sequence[Tally], seconds: float) -> EncodeSummary:
    """The figures of a committed job."""
    encoded = sum(tally.clips for tally in tallies)
    wall_seconds = sum(tally.seconds for tally in tallies)
    return EncodeSummary(
        encoded=encoded,
        reused=manifest.num_samples - encoded,
        quarantined=manifest.num_quarantined,
        encoded_in_float32=sum(tally.encoded_in_float32 for tally in tallies),
        frames=sum(tally.frames for tally in tallies),
        device_busy=sum(tally.busy_seconds for tally in tallies) / wall_seconds if wall_seconds else 0.0,
        shards=len(manifest.shards),
        seconds=seconds,
    )
