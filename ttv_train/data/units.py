"""What the encoding job has to do, cut into units that a killed job repeats as a whole.

A unit's clips are decided by the dataset and by what was committed before, not by the number of workers. Each finished
unit leaves a record in the store, `units/PLAN/UNIT.json`, named by its clips; a rerun skips the units whose record is
there, and all records are removed once the manifest is committed.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ttv_train.data.buckets import Bucket
from ttv_train.data.clips import Clip
from ttv_train.data.manifest import DECODE_VERSION, LatentEntry, StoredObject, stored_objects
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.storage import ByteRange, Store

KEY_LENGTH = 32
RECORDS_FOLDER = "units"


def clip_key(clip: Clip, *, decoder: str, vae_fingerprint: str, text_encoder_fingerprint: str) -> str:
    """Digest of all that decides the bytes of a sample: equal keys mean equal latents and embeddings."""
    return fingerprint(
        {
            "source": clip.source_sha256,
            "start_seconds": clip.start_seconds,
            "bucket": clip.bucket,
            "fps": clip.fps,
            "decoder": decoder,
            "decode_version": DECODE_VERSION,
            "caption": clip.source.caption,
            "vae": vae_fingerprint,
            "text_encoder": text_encoder_fingerprint,
        }
    )[:KEY_LENGTH]


@dataclass(frozen=True)
class WorkUnit:
    """Clips that become one shard, by key."""

    clips: tuple[tuple[str, Clip], ...]
    folder: str = RECORDS_FOLDER
    """Object name prefix of what workers note about the plan of which this is a unit."""

    @cached_property
    def name(self) -> str:
        """Digest of its keys."""
        return _digest(key for key, _ in self.clips)

    @property
    def num_pixels(self) -> int:
        """Of all its clips: what it costs to encode."""
        return sum(math.prod(clip.bucket) for _, clip in self.clips)

    @property
    def record_name(self) -> str:
        """Object name of the unit's record."""
        return f"{self.folder}/{self.name}.json"


@dataclass(frozen=True)
class UnitRecord:
    """What a unit came to."""

    shard: StoredObject | None
    """None if no clip of the unit could be encoded."""
    entries: list[LatentEntry]
    rejected: list[QuarantineRow]
    """The clips that could not."""


_RECORD: TypeAdapter[Any] = TypeAdapter(UnitRecord)


def plan_units(
    wanted: Mapping[str, Clip],
    fresh: Collection[str],
    *,
    samples_per_shard: int,
    shard_bytes: float = math.inf,
    sample_bytes: Callable[[Bucket], float] = lambda bucket: 0,
) -> list[WorkUnit]:
    """The clips of `wanted` whose key is not `fresh`, those of one bucket together so that they can be batched.

    Args:
        wanted: clips by key.
        fresh: keys that need not be encoded.
        samples_per_shard: clips of one unit, at most.
        shard_bytes: size of one unit's shard, at most, unless one clip alone is larger.
        sample_bytes: size of an encoded clip of a bucket.
    """
    todo = sorted(((key, clip) for key, clip in wanted.items() if key not in fresh), key=lambda item: item[1].bucket)
    folder = f"{RECORDS_FOLDER}/{_digest(key for key, _ in todo)}"
    units: list[WorkUnit] = []
    clips: list[tuple[str, Clip]] = []
    size = 0.0
    for key, clip in todo:
        more = sample_bytes(clip.bucket)
        if clips and (len(clips) == samples_per_shard or size + more > shard_bytes):
            units.append(WorkUnit(tuple(clips), folder))
            clips, size = [], 0.0
        clips.append((key, clip))
        size += more
    return [*units, WorkUnit(tuple(clips), folder)] if clips else units


def read_record(store: Store, unit: WorkUnit) -> UnitRecord | None:
    """What a worker has left of a finished unit; None unless its shard is there as well. OSError if the store fails."""
    return read_records(store, [unit])[0]


def read_records(store: Store, units: Sequence[WorkUnit]) -> list[UnitRecord | None]:
    """`read_record` of many units, several requests at a time."""
    results = store.read_many([ByteRange(unit.record_name) for unit in units])
    records: list[UnitRecord | None] = []
    for result in results:
        if isinstance(result, FileNotFoundError):
            records.append(None)
        elif isinstance(result, OSError):
            raise result
        else:
            try:
                records.append(_RECORD.validate_json(bytes(result)))
            except ValidationError:
                records.append(None)
    shards = [record.shard for record in records if record is not None and record.shard is not None]
    stored = {shard.name for shard in stored_objects(store, shards)}
    return [record if record is None or not record.shard or record.shard.name in stored else None for record in records]


def shards_of_records(store: Store, names: Sequence[str]) -> set[str]:
    """The shards that records refer to, given the records' object names."""
    shards = set()
    for result in store.read_many([ByteRange(name) for name in names]):
        if not isinstance(result, OSError):
            with contextlib.suppress(ValidationError):
                record: UnitRecord = _RECORD.validate_json(bytes(result))
                shards |= {record.shard.name} if record.shard is not None else set()
        elif not isinstance(result, FileNotFoundError):
            raise result
    return shards


def put_record(store: Store, unit: WorkUnit, record: UnitRecord) -> None:
    """Stores the record of a finished unit, whose shard must be stored already, unless there is a good one."""
    if read_record(store, unit) is None:
        store.put(unit.record_name, _RECORD.dump_json(record, indent=1))


def _digest(keys: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:KEY_LENGTH]
