"""What the encoding job has to do, cut into units that a killed job repeats as a whole.

A unit's clips are decided by the dataset and by what was committed before, not by the number of ranks. Each finished
unit leaves a record in the store, named by its clips; a rerun skips the units whose record is there, and the records
are removed once the manifest is committed.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ttv_train.data.clips import Clip
from ttv_train.data.manifest import DECODE_VERSION, LatentEntry, StoredObject, is_stored
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.storage import Store

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

    @cached_property
    def record_name(self) -> str:
        """Object name of the unit's record."""
        digest = hashlib.sha256("\n".join(key for key, _ in self.clips).encode()).hexdigest()
        return f"{RECORDS_FOLDER}/{digest[:KEY_LENGTH]}.json"


@dataclass(frozen=True)
class UnitRecord:
    """What a unit came to."""

    shard: StoredObject | None
    """None if no clip of the unit could be encoded."""
    entries: list[LatentEntry]
    rejected: list[QuarantineRow]
    """The clips that could not."""


_RECORD: TypeAdapter[Any] = TypeAdapter(UnitRecord)


def plan_units(wanted: Mapping[str, Clip], fresh: Collection[str], samples_per_shard: int) -> list[WorkUnit]:
    """The clips of `wanted` whose key is not `fresh`, those of one bucket together so that they can be batched."""
    todo = sorted(((key, clip) for key, clip in wanted.items() if key not in fresh), key=lambda item: item[1].bucket)
    return [
        WorkUnit(tuple(todo[start : start + samples_per_shard])) for start in range(0, len(todo), samples_per_shard)
    ]


def read_record(store: Store, unit: WorkUnit) -> UnitRecord | None:
    """What an earlier, killed job has left of a unit; None unless its shard is there as well."""
    try:
        record: UnitRecord = _RECORD.validate_json(store.read(unit.record_name))
    except (OSError, ValidationError):
        return None
    return record if record.shard is None or is_stored(store, record.shard) else None


def put_record(store: Store, unit: WorkUnit, record: UnitRecord) -> None:
    """Stores the record of a finished unit, whose shard must be stored already."""
    store.put(unit.record_name, _RECORD.dump_json(record, indent=1))
