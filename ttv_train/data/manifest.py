"""What an encoded dataset consists of, and the order in which it is published.

    manifest.json                names everything else with size and digest; replaced last, at once
    index-DIGEST.parquet         one row per sample, see `ttv_train.data.latent_index`
    null-prompt-DIGEST.safetensors
    shards/DIGEST.tar            see `ttv_train.data.shards`

Everything but the manifest is named by its content and never changes. Readers follow the manifest and list nothing.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ttv_train.encoders.vae.base import LatentNormalization
from ttv_train.errors import UserError
from ttv_train.storage import ByteRange, DamagedReadError, Store, StoreUnavailableError

REQUESTS_AT_A_TIME = 32
MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3
DECODE_VERSION = 1
"""Raise it when the decoder gives other pixels for the same clip: what was encoded before is stale then."""


@dataclass(frozen=True)
class StoredObject:
    """One object of the store."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class LatentEntry:
    """One sample: where it lies, and what it was made from."""

    key: str
    """Digest of the source's bytes, the clip's range, its size and caption, and both encoders."""
    shard: str
    """Object name of the tar file."""
    offset: int
    """Of the sample's safetensors file in the shard, in bytes."""
    length: int
    """Of that file, in bytes."""
    sha256: str
    """Of that file: names it in the node's cache."""
    xxh3: str
    """XXH3 (128 bits) of that file: compared with whenever it is read."""
    source_name: str
    """The video, relative to the dataset folder."""
    source_sha256: str
    clip_index: int
    """Number of the clip in its video."""
    is_last_clip: bool
    """Whether it is the last of several clips of its video."""
    caption: str
    bucket: tuple[int, int, int]
    """Frames, height and width of the clip in pixels."""
    fps: float
    latent_shape: tuple[int, int, int, int]
    """``(C, t, h, w)``"""
    num_text_tokens: int
    start_seconds: float = 0.0
    """Where the clip starts in its video."""


@dataclass(frozen=True)
class Manifest:
    """The root of an encoded dataset."""

    format_version: int
    decode_version: int
    fingerprint: str
    """See `ttv_train.encoders.encoder_fingerprint`."""
    normalization: LatentNormalization
    num_samples: int
    num_quarantined: int
    """Clips and files that were left out."""
    null_prompt: StoredObject
    """Embedding and mask of the empty prompt."""
    index: StoredObject
    shards: list[StoredObject]


_MANIFEST = TypeAdapter(Manifest)


class DamagedStoreError(UserError):
    """The manifest or what it names is absent, damaged or of another version."""


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """The manifest and its SHA-256.

    Raises:
        DamagedStoreError: it is absent, damaged or of a version that this program does not read.
    """
    try:
        content = store.read(MANIFEST_NAME)
    except StoreUnavailableError as error:
        raise storage_is_down(error) from None
    except OSError:
        raise DamagedStoreError(
            f"latents.path {store.url}: no {MANIFEST_NAME} in it; run `ttv-train encode` with this config first"
        ) from None
    manifest = _parse(_MANIFEST, content, MANIFEST_NAME, store)
    if (manifest.format_version, manifest.decode_version) != (FORMAT_VERSION, DECODE_VERSION):
        raise DamagedStoreError(
            f"latents.path {store.url}: encoded by another version of ttv-train; run `ttv-train encode` again"
        )
    return manifest, hashlib.sha256(content).hexdigest()


def storage_is_down(error: OSError | str, then: str = "") -> UserError:
    """What a user reads when the storage of latents does not answer.

    Args:
        error: names the storage.
        then: what comes of starting again.
    """
    return UserError(f"latents.path {error}; see that the storage is up, then start again{then and f': {then}'}")


def read_object(store: Store, stored: StoredObject) -> bytes:
    """A whole object, verified. Raises DamagedStoreError if it is absent or damaged."""
    try:
        return bytes(store.read_range(ByteRange(stored.name, 0, stored.size, stored.sha256, is_whole=True)))
    except StoreUnavailableError as error:
        raise storage_is_down(error) from None
    except DamagedReadError:
        raise DamagedStoreError(
            f"latents.path {store.url}: {stored.name} is damaged; run `ttv-train encode` again"
        ) from None
    except OSError:
        raise DamagedStoreError(
            f"latents.path {store.url}: {stored.name} is missing; run `ttv-train encode` again"
        ) from None


def put_object(store: Store, prefix: str, suffix: str, content: bytes) -> StoredObject:
    """Stores `content` under a name made of its digest, unless it is there already, undamaged."""
    digest = hashlib.sha256(content).hexdigest()
    stored = StoredObject(f"{prefix}{digest[:32]}{suffix}", len(content), digest)
    if not is_intact(store, stored):
        store.put(stored.name, content)
    return stored


def is_intact(store: Store, stored: StoredObject) -> bool:
    """Whether an object is there with the bytes that were written; reads all of them."""
    return is_stored(store, stored) and hashlib.sha256(store.read(stored.name)).hexdigest() == stored.sha256


def is_stored(store: Store, stored: StoredObject) -> bool:
    """Whether an object is there, by its size; its bytes are verified when it is read."""
    return store.size(stored.name) == stored.size


def stored_objects(store: Store, objects: Sequence[StoredObject]) -> list[StoredObject]:
    """Those that are there, by their size; asks for several at a time."""
    with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool:
        found = list(pool.map(lambda stored: is_stored(store, stored), objects))
    return [stored for stored, is_there in zip(objects, found, strict=True) if is_there]


def put_manifest(store: Store, manifest: Manifest) -> None:
    """Commits an encoded dataset: from here on readers see it. All that it names must be stored already."""
    store.put(MANIFEST_NAME, _MANIFEST.dump_json(manifest, indent=1))


def _parse(adapter: TypeAdapter[Any], content: bytes, name: str, store: Store) -> Any:
    try:
        return adapter.validate_json(content)
    except ValidationError:
        raise DamagedStoreError(
            f"latents.path {store.url}: {name} is damaged or of another version; run `ttv-train encode` again"
        ) from None
