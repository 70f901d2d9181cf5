"""No byte passes that was not written: sizes and digests come from the manifest, whatever the door."""

import hashlib
from collections.abc import Sequence

import xxhash

from ttv_train.storage.base import Store
from ttv_train.storage.counters import counters
from ttv_train.storage.failures import DamagedReadError
from ttv_train.storage.layer import Layer, ReadResult
from ttv_train.storage.ranges import ByteRange, Content


class VerifiedReads(Layer[Store]):
    """Ranges whose digest is known are compared with it. A mount may answer a cut-off or an old object without an
    error; here that becomes a DamagedReadError."""

    def read_many(self, ranges: Sequence[ByteRange]) -> list[ReadResult]:
        """See `Store.read_many`."""
        results = self.inner.read_many(ranges)
        return [
            result if isinstance(result, OSError) else verified(result, wanted)
            for result, wanted in zip(results, ranges, strict=True)
        ]


def verified(content: Content, wanted: ByteRange) -> ReadResult:
    """`content`, or the DamagedReadError that it deserves, which is counted."""
    if wanted.sha256 is None and wanted.xxh3 is None:
        return content
    error = None
    if wanted.length is not None and len(content) != wanted.length:
        kind = "short" if len(content) < wanted.length else "long"
        error = DamagedReadError(kind, f"{len(content)} bytes of {wanted.length} are there")
    elif not has_checksum(content, wanted):
        error = DamagedReadError("corrupt", "its bytes are not those that were written (checksum)")
    if error is None:
        return content
    counters.add_error(error.kind)
    return error


def has_checksum(content: Content, wanted: ByteRange) -> bool:
    """Whether `content` is what was written, by the cheapest checksum that is known of it."""
    if wanted.xxh3 is not None:
        return xxhash.xxh3_128_hexdigest(content) == wanted.xxh3
    return hashlib.sha256(content).hexdigest() == wanted.sha256
