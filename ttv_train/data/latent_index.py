"""The index of an encoded dataset: a Parquet file with a row per sample, which other tools read as well.

    key, shard, offset, length, sha256, xxh3    what it is and where it lies
    source_name, source_sha256, clip_index, is_last_clip, start_seconds, fps, bucket
    caption, caption_id                         equal captions have equal ids
    latent_shape, num_text_tokens

The fingerprints of the encoders, which all samples share, are in the file's metadata.
"""

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import pyarrow as pa
import pyarrow.parquet as pq

from ttv_train.data.manifest import DamagedStoreError, LatentEntry, Manifest, StoredObject, put_object, read_object
from ttv_train.storage import Store

ROWS_PER_GROUP = 20_000
CAPTION_ID_LENGTH = 32
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("sha256", pa.string()),
        ("xxh3", pa.string()),
        ("source_name", pa.string()),
        ("source_sha256", pa.string()),
        ("clip_index", pa.int32()),
        ("is_last_clip", pa.bool_()),
        ("caption", pa.dictionary(pa.int32(), pa.string())),
        ("bucket", pa.list_(pa.int32(), 3)),
        ("fps", pa.float64()),
        ("latent_shape", pa.list_(pa.int32(), 4)),
        ("num_text_tokens", pa.int32()),
        ("start_seconds", pa.float64()),
        ("caption_id", pa.dictionary(pa.int32(), pa.string())),
    ]
)
ENTRY_FIELDS = tuple(field.name for field in fields(LatentEntry))
TUPLES = ("bucket", "latent_shape")
DAMAGE = (pa.ArrowInvalid, pa.ArrowKeyError, OSError, KeyError, UnicodeDecodeError)


class EntryTable(Sequence[LatentEntry]):
    """The entries of an index, made from Arrow columns when they are asked for: a row takes a fraction of an object."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> LatentEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[LatentEntry]: ...
    def __getitem__(self, index: int | slice) -> LatentEntry | list[LatentEntry]:
        rows = range(len(self))[index]
        if isinstance(rows, int):
            return _entry(self._table.slice(rows, 1).to_pylist()[0])
        return [_entry(row) for row in self._table.take(list(rows)).to_pylist()]

    def __iter__(self) -> Iterator[LatentEntry]:
        for batch in self._table.to_batches(max_chunksize=ROWS_PER_GROUP):
            columns = [batch.column(name).to_pylist() for name in ENTRY_FIELDS]
            for values in zip(*columns, strict=True):
                yield _entry(dict(zip(ENTRY_FIELDS, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))


@dataclass(frozen=True)
class LatentIndex:
    """Every sample of an encoded dataset. They all come from the same encoders."""

    vae_fingerprint: str
    text_encoder_fingerprint: str
    entries: Sequence[LatentEntry]


def put_index(store: Store, index: LatentIndex) -> StoredObject:
    """Stores the index. Equal entries give equal bytes."""
    schema = SCHEMA.with_metadata(
        {"vae_fingerprint": index.vae_fingerprint, "text_encoder_fingerprint": index.text_encoder_fingerprint}
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd", store_schema=True) as writer:
        for start in range(0, len(index.entries), ROWS_PER_GROUP):
            entries = index.entries[start : start + ROWS_PER_GROUP]
            columns: dict[str, list[Any]] = {name: [getattr(entry, name) for entry in entries] for name in ENTRY_FIELDS}
            columns["caption_id"] = [caption_id(entry.caption) for entry in entries]
            writer.write_table(pa.Table.from_pydict(columns, schema=schema))
    return put_object(store, "index-", ".parquet", sink.getvalue().to_pybytes())


def read_index(store: Store, manifest: Manifest) -> LatentIndex:
    """The index that `manifest` names. Raises DamagedStoreError if it is absent or damaged."""
    content = read_object(store, manifest.index)
    try:
        table = pq.ParquetFile(pa.BufferReader(content)).read(columns=list(ENTRY_FIELDS))
        metadata = table.schema.metadata
        vae, text_encoder = (metadata[name].decode() for name in (b"vae_fingerprint", b"text_encoder_fingerprint"))
    except DAMAGE:
        raise DamagedStoreError(
            f"latents.path {store.url}: {manifest.index.name} is damaged or of another version; run `ttv-train encode` "
            "again"
        ) from None
    return LatentIndex(vae, text_encoder, EntryTable(table.unify_dictionaries()))


def caption_id(caption: str) -> str:
    """Digest of a caption."""
    return hashlib.sha256(caption.encode()).hexdigest()[:CAPTION_ID_LENGTH]


def _entry(row: dict[str, Any]) -> LatentEntry:
    return LatentEntry(**row | {name: tuple(row[name]) for name in TUPLES})
