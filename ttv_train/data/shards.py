"""Latent shards: tar files that webdataset reads, of which training reads one sample per request.

A shard holds, for every sample, `KEY.json` (what the sample is) and `KEY.safetensors` with

    mean            (C, t, h, w)    latents, not normalized
    logvar          (C, t, h, w)    of a variational VAE only
    prompt_embeds   (L, D)
    prompt_mask     (L,) bool       True where there is a token
    first_frame     (C, t, h, w)    for image-to-video models only: see `FirstFrame`
    first_frame_embeds  (N, D)

The bytes of a shard depend on its samples alone. No container notices a flipped byte, so every sample is verified
against the checksum of the index when it is read.
"""

import hashlib
import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
import xxhash
from safetensors.torch import load, save

from ttv_train.config import StorageConfig
from ttv_train.data.latent_index import read_index
from ttv_train.data.manifest import (
    MANIFEST_NAME,
    LatentEntry,
    StoredObject,
    put_object,
    read_manifest,
    read_object,
    storage_is_down,
)
from ttv_train.data.tensor_views import view_tensors
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders.vae.base import LatentNormalization
from ttv_train.errors import UserError
from ttv_train.storage import ByteRange, Content, DamagedReadError, Store, StoreUnavailableError, open_store

__all__ = ["CorruptSampleError", "LatentEntry", "LatentNormalization", "LatentSample", "LatentStore", "put_shard"]

PLACEMENT = ("shard", "offset", "length", "sha256", "xxh3")
"""Fields of an entry that say where it lies; the others describe it and are written into the shard."""


class CorruptSampleError(Exception):
    """A sample that cannot be read as it was written."""

    def __init__(self, key: str, shard: str, reason: str) -> None:
        super().__init__(f"sample {key} in {shard}: {reason}")
        self.key = key
        self.shard = shard
        self.reason = reason


@dataclass
class LatentSample:
    """What one clip and its caption were encoded to, on the CPU, of the encoders' dtypes."""

    entry: LatentEntry
    mean: torch.Tensor
    """(C, t, h, w), not normalized."""
    logvar: torch.Tensor | None
    """(C, t, h, w)"""
    prompt_embeds: torch.Tensor
    """(L, D)"""
    prompt_mask: torch.Tensor
    """(L,) bool"""
    first_frame: FirstFrame | None = None
    """Where it was encoded; its latents are not normalized."""


SampleResult = LatentSample | CorruptSampleError


class SampleReads(ABC):
    """Reads one sample as it reads many."""

    @abstractmethod
    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """See `LatentDataset.read_many`."""

    def read(self, entry: LatentEntry) -> LatentSample:
        """One sample. Raises CorruptSampleError, and what `read_many` raises."""
        (result,) = self.read_many([entry])
        if isinstance(result, CorruptSampleError):
            raise result
        return result


class LatentStore(SampleReads):
    """An encoded dataset, read by training. Samples may be read from several threads at once.

    Attributes:
        manifest_digest: SHA-256 of the manifest: it stands for every byte of the dataset.
        fingerprint: of the settings that it was encoded with; compare with `encoder_fingerprint(config)`.
        encoders: fingerprints of the VAE and the text encoder alone; compare with `encoder_fingerprints(config)`.
        normalization: to be applied to every sample's latents.
        num_quarantined: clips and files that were left out.
        joins_reads: see `LatentDataset`.
        entries: the samples, in the order of the dataset.
    """

    def __init__(self, path: str, storage: StorageConfig | None = None) -> None:
        """See `open`."""
        if not path:
            raise UserError("latents.path is not set; name the folder or URL of the encoded dataset")
        self.path = path
        self.store = open_store(path, storage)
        self.joins_reads = self.store.tier != "disk"
        manifest, self.manifest_digest = read_manifest(self.store)
        self._null_prompt_object = manifest.null_prompt
        self.fingerprint = manifest.fingerprint
        self.normalization = manifest.normalization
        self.num_quarantined = manifest.num_quarantined
        index = read_index(self.store, manifest)
        self.encoders = (index.vae_fingerprint, index.text_encoder_fingerprint)
        self.entries: Sequence[LatentEntry] = index.entries

    @classmethod
    def open(cls, path: str, storage: StorageConfig | None = None) -> "LatentStore":
        """Opens the dataset at a folder or URL; verifies its manifest and index.

        Raises:
            UserError: there is none, or it is damaged.
        """
        return cls(path, storage)

    @staticmethod
    def exists(path: str, storage: StorageConfig | None = None) -> bool:
        """Whether an encoded dataset was committed at `path`."""
        return bool(path) and open_store(path, storage).exists(MANIFEST_NAME)

    def by_store(self, entries: Sequence[LatentEntry]) -> Iterator[tuple["LatentStore", Sequence[LatentEntry]]]:
        """This store and all of `entries`; see `MixedDataset.by_store`."""
        yield self, entries

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Reads samples with as few requests as their places allow; in the order asked for, each as it is or as the
        CorruptSampleError that its reading ended in.

        Raises:
            UserError: the storage did not answer by `storage.deadline_seconds`. Nothing is known to be wrong with the
                samples then, so that none is replaced: the run stops, and goes on later from its newest checkpoint.
        """
        results = self.store.read_many([range_of(entry) for entry in entries])
        return [self._sample(entry, result) for entry, result in zip(entries, results, strict=True)]

    def _sample(self, entry: LatentEntry, result: Content | OSError) -> SampleResult:
        if isinstance(result, StoreUnavailableError):
            raise storage_is_down(result, "the run goes on from its newest checkpoint")
        if isinstance(result, DamagedReadError):
            return CorruptSampleError(entry.key, entry.shard, str(result))
        if isinstance(result, OSError):
            return CorruptSampleError(entry.key, entry.shard, f"cannot be read: {result}")
        try:
            return unpack_sample(entry, result)
        except (ValueError, KeyError) as error:
            return CorruptSampleError(entry.key, entry.shard, f"not a sample: {error}")

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt. Raises UserError if they are damaged."""
        return self._null_prompt

    def close(self) -> None:
        """See `LatentDataset.close`; a read that is under way ends by itself."""

    @cached_property
    def _null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        return unpack_null_prompt(read_object(self.store, self._null_prompt_object))


def range_of(entry: LatentEntry) -> ByteRange:
    """Where a sample's tensors lie, and their checksums."""
    return ByteRange(entry.shard, entry.offset, entry.length, entry.sha256, entry.xxh3)


def put_null_prompt(store: Store, prompt_embeds: torch.Tensor, prompt_mask: torch.Tensor) -> StoredObject:
    """Stores embedding (L, D) and mask (L,) of the empty prompt."""
    return put_object(store, "null-prompt-", ".safetensors", pack_null_prompt(prompt_embeds, prompt_mask))


def pack_null_prompt(prompt_embeds: torch.Tensor, prompt_mask: torch.Tensor) -> bytes:
    """The safetensors file of embedding (L, D) and mask (L,) of the empty prompt."""
    return save({"prompt_embeds": prompt_embeds.contiguous(), "prompt_mask": prompt_mask.contiguous()})


def unpack_null_prompt(content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_null_prompt`."""
    tensors = load(content)
    return tensors["prompt_embeds"], tensors["prompt_mask"]


def put_shard(store: Store, samples: Sequence[LatentSample]) -> tuple[StoredObject, list[LatentEntry]]:
    """Stores samples as one shard.

    Returns:
        The shard, and the samples' entries with their places filled in, in the order of `samples`.
    """
    content, places = pack_shard(samples)
    shard = put_object(store, "shards/", ".tar", content)
    entries = []
    for sample in samples:
        offset, length = places[sample.entry.key]
        part = memoryview(content)[offset : offset + length]
        sha256, xxh3 = hashlib.sha256(part).hexdigest(), xxhash.xxh3_128_hexdigest(part)
        entries.append(replace(sample.entry, shard=shard.name, offset=offset, length=length, sha256=sha256, xxh3=xxh3))
    return shard, entries


def pack_shard(samples: Sequence[LatentSample]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The tar file of samples, and (offset, length) of each one's tensors in it by key."""
    buffer = io.BytesIO()
    places = {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in sorted(samples, key=lambda sample: sample.entry.key):
            key = sample.entry.key
            description = {name: value for name, value in asdict(sample.entry).items() if name not in PLACEMENT}
            _add(tar, f"{key}.json", json.dumps(description, indent=1).encode())
            content = pack_sample(sample)
            places[key] = (tar.offset + tarfile.BLOCKSIZE, len(content))
            _add(tar, f"{key}.safetensors", content)
    return buffer.getvalue(), places


def pack_sample(sample: LatentSample) -> bytes:
    """The safetensors file of a sample's tensors."""
    tensors = {
        "mean": sample.mean,
        "logvar": sample.logvar,
        "prompt_embeds": sample.prompt_embeds,
        "prompt_mask": sample.prompt_mask,
        "first_frame": None if sample.first_frame is None else sample.first_frame.latents,
        "first_frame_embeds": None if sample.first_frame is None else sample.first_frame.embeds,
    }
    return save({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None})


def unpack_sample(entry: LatentEntry, content: Content) -> LatentSample:
    """The inverse of `pack_sample`; see `view_tensors`. Raises ValueError or KeyError if `content` is no sample."""
    tensors = view_tensors(content)
    first_frame = None
    if "first_frame" in tensors:
        first_frame = FirstFrame(tensors["first_frame"], tensors.get("first_frame_embeds"))
    return LatentSample(
        entry, tensors["mean"], tensors.get("logvar"), tensors["prompt_embeds"], tensors["prompt_mask"], first_frame
    )


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    # A fresh TarInfo has no owner, no time and fixed permissions: the same samples always give the same bytes.
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
