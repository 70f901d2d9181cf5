"""Latent shards: tar files that webdataset reads, of which training reads one sample per request.

A shard holds, for every sample, `KEY.json` (what the sample is) and `KEY.safetensors` with

    mean            (C, t, h, w)    latents, not normalized
    logvar          (C, t, h, w)    of a variational VAE only
    prompt_embeds   (L, D)
    prompt_mask     (L,) bool       True where there is a token

The bytes of a shard depend on its samples alone. No container notices a flipped byte, so every sample is verified
against the digest of the index when it is read.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ttv_train.data.manifest import (
    MANIFEST_NAME,
    LatentEntry,
    StoredObject,
    put_object,
    read_index,
    read_manifest,
    read_object,
)
from ttv_train.encoders.vae.base import LatentNormalization
from ttv_train.errors import UserError
from ttv_train.storage import Store, open_store

__all__ = ["CorruptSampleError", "LatentEntry", "LatentNormalization", "LatentSample", "LatentStore", "put_shard"]

PLACEMENT = ("shard", "offset", "length", "sha256")
"""Fields of an entry that say where it lies; the others describe it and are written into the shard."""


class CorruptSampleError(Exception):
    """A sample that cannot be read as it was written."""

    def __init__(self, key: str, shard: str, reason: str) -> None:
        super().__init__(f"sample {key} in {shard}: {reason}")
        self.key = key
        self.shard = shard


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


class LatentStore:
    """An encoded dataset, read by training. Samples may be read from several threads at once.

    Attributes:
        manifest_digest: SHA-256 of the manifest: it stands for every byte of the dataset.
        fingerprint: of the settings that it was encoded with; compare with `encoder_fingerprint(config)`.
        encoders: fingerprints of the VAE and the text encoder alone; compare with `encoder_fingerprints(config)`.
        normalization: to be applied to every sample's latents.
        num_quarantined: clips and files that were left out.
        entries: the samples, in the order of the dataset.
    """

    def __init__(self, path: str) -> None:
        """See `open`."""
        if not path:
            raise UserError("latents.path is not set; name the folder or URL of the encoded dataset")
        self.path = path
        self._store = open_store(path)
        manifest, self.manifest_digest = read_manifest(self._store)
        self._null_prompt_object = manifest.null_prompt
        self.fingerprint = manifest.fingerprint
        self.normalization = manifest.normalization
        self.num_quarantined = manifest.num_quarantined
        index = read_index(self._store, manifest)
        self.encoders = (index.vae_fingerprint, index.text_encoder_fingerprint)
        self.entries = index.entries

    @classmethod
    def open(cls, path: str) -> "LatentStore":
        """Opens the dataset at a folder or fsspec URL; verifies its manifest and index.

        Raises:
            UserError: there is none, or it is damaged.
        """
        return cls(path)

    @staticmethod
    def exists(path: str) -> bool:
        """Whether an encoded dataset was committed at `path`."""
        return bool(path) and open_store(path).exists(MANIFEST_NAME)

    def read(self, entry: LatentEntry) -> LatentSample:
        """Reads one sample with one request. Raises CorruptSampleError unless its bytes are those that were written."""
        try:
            content = self._store.read(entry.shard, entry.offset, entry.length)
        except OSError as error:
            raise CorruptSampleError(entry.key, entry.shard, f"cannot be read: {error}") from None
        if len(content) != entry.length:
            raise CorruptSampleError(entry.key, entry.shard, f"{len(content)} bytes of {entry.length} are there")
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise CorruptSampleError(entry.key, entry.shard, "its bytes are not those that were written (SHA-256)")
        try:
            tensors = load(content)
            return LatentSample(
                entry, tensors["mean"], tensors.get("logvar"), tensors["prompt_embeds"], tensors["prompt_mask"]
            )
        except (SafetensorError, KeyError) as error:
            raise CorruptSampleError(entry.key, entry.shard, f"not a sample: {error}") from None

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt. Raises UserError if they are damaged."""
        return self._null_prompt

    @cached_property
    def _null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = load(read_object(self._store, self._null_prompt_object))
        return tensors["prompt_embeds"], tensors["prompt_mask"]


def put_null_prompt(store: Store, prompt_embeds: torch.Tensor, prompt_mask: torch.Tensor) -> StoredObject:
    """Stores embedding (L, D) and mask (L,) of the empty prompt."""
    content = save({"prompt_embeds": prompt_embeds.contiguous(), "prompt_mask": prompt_mask.contiguous()})
    return put_object(store, "null-prompt-", ".safetensors", content)


def put_shard(store: Store, samples: Sequence[LatentSample]) -> tuple[StoredObject, list[LatentEntry]]:
    """Stores samples as one shard.

    Returns:
        The shard, and the samples' entries with their places filled in, in the order of `samples`.
    """
    content, places = _pack(samples)
    shard = put_object(store, "shards/", ".tar", content)
    entries = []
    for sample in samples:
        offset, length = places[sample.entry.key]
        digest = hashlib.sha256(memoryview(content)[offset : offset + length]).hexdigest()
        entries.append(replace(sample.entry, shard=shard.name, offset=offset, length=length, sha256=digest))
    return shard, entries


def _pack(samples: Sequence[LatentSample]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The tar file, and (offset, length) of each sample's tensors in it by key."""
    buffer = io.BytesIO()
    places = {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in sorted(samples, key=lambda sample: sample.entry.key):
            key = sample.entry.key
            description = {name: value for name, value in asdict(sample.entry).items() if name not in PLACEMENT}
            _add(tar, f"{key}.json", json.dumps(description, indent=1).encode())
            tensors = {
                "mean": sample.mean,
                "logvar": sample.logvar,
                "prompt_embeds": sample.prompt_embeds,
                "prompt_mask": sample.prompt_mask,
            }
            content = save({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None})
            places[key] = (tar.offset + tarfile.BLOCKSIZE, len(content))
            _add(tar, f"{key}.safetensors", content)
    return buffer.getvalue(), places


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    # A fresh TarInfo has no owner, no time and fixed permissions: the same samples always give the same bytes.
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
