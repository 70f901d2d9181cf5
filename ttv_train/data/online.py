"""A dataset whose clips are decoded and encoded when training asks for them, instead of ahead of it.

To training it is the same as latents that were encoded before: the same keys, the same order and the same loss curve.
Every rank encodes what it trains on, or ranks that train on the same clips encode each one together.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from ttv_train.config import DatasetConfig, RunConfig
from ttv_train.data.changed_sources import DATASET_MANIFEST
from ttv_train.data.clips import list_clips
from ttv_train.data.cut import Clip
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import BadVideoError
from ttv_train.data.quarantine import Quarantine, QuarantineRow
from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentSample, SampleResult
from ttv_train.data.shared import Follower, Leader
from ttv_train.data.units import clip_key
from ttv_train.devices import get_backend
from ttv_train.encoders.clip_encoder import ClipEncoder, NonFiniteError
from ttv_train.encoders.followers import encoding_group
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_main_rank


class OnlineDataset:
    """Implements `LatentDataset`. Samples may be read from several threads; one at a time encodes.

    The device encodes on a stream of its own, beside the training step. What comes of it lies in host memory, so nobody
    has to wait for that stream: the copy from the device has done so.

    Args:
        config: of the clips.
        clips: by key, in the order of the dataset.
        num_quarantined: files that gave no clip.
        encoder: makes latents and embeddings.
        device: of the encoder.
    """

    fingerprint = ""
    joins_reads = False

    def __init__(
        self,
        config: DatasetConfig,
        clips: Mapping[str, Clip],
        num_quarantined: int,
        encoder: ClipEncoder,
        device: torch.device,
    ) -> None:
        self.path = config.path
        self.normalization = encoder.vae.normalization
        self.num_quarantined = num_quarantined
        self.entries = [entry_of(key, clip, encoder) for key, clip in clips.items()]
        self._config, self._clips, self._encoder, self._device = config, clips, encoder, device
        backend = get_backend(device.type)
        backend.synchronize()  # what the encoders hold by now was made on another stream
        self._stream = backend.side_stream()
        self._encoding = threading.Lock()
        self._is_closed = False
        self._local = threading.local()

    def read(self, entry: LatentEntry) -> LatentSample:
        """Decodes and encodes one clip. Raises CorruptSampleError if that fails."""
        clip = self._clips[entry.key]
        if not hasattr(self._local, "decoder"):
            self._local.decoder = ClipDecoder(self._config)
        try:
            video = self._local.decoder.decode(clip)
        except BadVideoError as error:
            raise CorruptSampleError(entry.key, clip.source.name, str(error)) from None
        with self._encoding, self._stream:
            if self._is_closed:
                raise RuntimeError("the dataset is closed")
            (encoded,) = self._encoder.encode([video], [clip.source.caption])
        if isinstance(encoded, NonFiniteError):
            raise CorruptSampleError(entry.key, clip.source.name, str(encoded))
        return LatentSample(
            entry, encoded.mean, encoded.logvar, encoded.prompt_embeds, encoded.prompt_mask, encoded.first_frame
        )

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Samples in the order asked for, each as it is or as the CorruptSampleError that its reading ended in."""
        results: list[SampleResult] = []
        for entry in entries:
            try:
                results.append(self.read(entry))
            except CorruptSampleError as error:
                results.append(error)
        return results

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        with self._encoding, self._stream:
            return self._encoder.encode_null_prompt()

    def follow(self) -> None:
        """On the other ranks of a group: shares the work on the leader's clips until it closes its dataset."""
        with get_backend(self._device.type).side_stream():
            self._encoder.follow()

    def close(self) -> None:
        """See `LatentDataset.close`; waits for the clip that is being encoded."""
        with self._encoding:
            if not self._is_closed:
                self._encoder.dismiss_followers()
            self._is_closed = True


def open_online(config: RunConfig, device: torch.device, writes: bool) -> LatentDataset:
    """The clips of `dataset`, on all ranks together; rank 0 lists them. `vae.parallel.degree` ranks, which train on the
    same clips, encode each one together.

    Args:
        config: of the run.
        device: of the encoders.
        writes: keep a manifest of the dataset in the output folder, and note in quarantine.jsonl what gives no clip.

    Raises:
        UserError: on every rank, if the dataset cannot be read or gives no clip, the VAE does not take its buckets, or
            ranks that encode together would train on different clips.
    """
    degree, sequence_degree = config.vae.parallel.degree, config.parallel.sequence.degree
    if sequence_degree % degree:
        raise UserError(
            f"vae.parallel.degree {degree} does not divide parallel.sequence.degree {sequence_degree}: with "
            "latents.online, ranks that encode a clip together must train on it together; change one of them"
        )
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    group = encoding_group(degree, timeout)
    encoder = ClipEncoder(config.vae, config.text_encoder, device, config.first_frame, group)
    output = Path(config.output_dir)

    def list_keyed() -> tuple[dict[str, Clip], int]:
        manifest = output / DATASET_MANIFEST if writes else None
        clips, rejected = list_clips(config.dataset, encoder.vae.valid_num_frames, manifest=manifest)
        keyed: dict[str, Clip] = {}
        for clip in clips:
            key = clip_key(
                clip,
                decoder=config.dataset.decoder,
                vae_fingerprint=encoder.visual_fingerprint,
                text_encoder_fingerprint=encoder.text_encoder.fingerprint,
            )
            if key in keyed:
                reason = f"same content and caption as {keyed[key].source.name}"
                rejected.append(QuarantineRow(clip.source.name, reason, "encode"))
            else:
                keyed[key] = clip
        if writes:
            Quarantine(output / "quarantine.jsonl").replace(("list", "probe", "decode", "encode"), rejected)
        if not keyed:
            raise UserError(f"dataset.path {config.dataset.path}: it gives no clip; `ttv-train check-data` says why")
        return keyed, len(rejected)

    clips, num_quarantined = on_main_rank(list_keyed)
    dataset = OnlineDataset(config.dataset, clips, num_quarantined, encoder, device)
    if group is None:
        return dataset
    if group.is_follower:
        return Follower(dataset, group.control, help=dataset.follow)
    return Leader(dataset, group.control)


def entry_of(key: str, clip: Clip, encoder: ClipEncoder) -> LatentEntry:
    """What training knows of a clip before it is encoded."""
    shape = encoder.vae.latent_shape(*clip.bucket)
    return LatentEntry(
        key=key,
        shard=clip.source.name,
        offset=0,
        length=0,
        sha256="",
        xxh3="",
        source_name=clip.source.name,
        source_sha256=clip.source_sha256,
        clip_index=clip.index,
        is_last_clip=clip.is_last,
        caption=clip.source.caption,
        bucket=clip.bucket,
        fps=clip.fps,
        latent_shape=shape,
        num_text_tokens=encoder.text_encoder.max_length,
        start_seconds=clip.start_seconds,
    )
