"""Samples in messages between ranks: as they are stored, so that what arrives has the bits that were encoded."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from ttv_train.data.cut import Clip
from ttv_train.data.shards import CorruptSampleError, LatentEntry, SampleResult, pack_sample, unpack_sample

CLIPS = TypeAdapter(list[tuple[str, Clip]])
"""Keys and clips that are asked for, as JSON."""


def pack_results(entries: Sequence[LatentEntry], results: Sequence[SampleResult]) -> tuple[dict[str, Any], bytes]:
    """Header and content of the message that says what reading `entries` came to."""
    samples = [b"" if isinstance(result, CorruptSampleError) else pack_sample(result) for result in results]
    facts = [
        (entry.key, result.reason if isinstance(result, CorruptSampleError) else None, len(sample))
        for entry, result, sample in zip(entries, results, samples, strict=True)
    ]
    return {"results": facts}, b"".join(samples)


def unpack_results(
    header: Mapping[str, Any], content: bytes, entries: Mapping[str, LatentEntry]
) -> list[tuple[str, SampleResult]]:
    """The inverse of `pack_results`: results with the keys of their samples. `entries` are by key."""
    results: list[tuple[str, SampleResult]] = []
    start = 0
    for key, reason, size in header["results"]:
        entry = entries[key]
        if reason is None:
            results.append((key, unpack_sample(entry, content[start : start + size])))
        else:
            results.append((key, CorruptSampleError(key, entry.shard, reason)))
        start += size
    return results
