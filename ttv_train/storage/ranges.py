"""Byte ranges, what is read of them, and how many of them become few requests."""

from collections.abc import Sequence
from dataclasses import dataclass

Content = bytes | bytearray | memoryview
"""What was read. Where it can be written to, it is its reader's alone."""


@dataclass(frozen=True)
class ByteRange:
    """A part of an object, and what is known of its content."""

    name: str
    offset: int = 0
    length: int | None = None
    """None reads to the end."""
    sha256: str | None = None
    """Of the part. With it, anything but these bytes is an error."""
    xxh3: str | None = None
    """XXH3 (128 bits, hexadecimal) of the part. Where it is known it is compared in place of SHA-256, at a fraction of
    the cost: it notices whatever goes wrong by chance, but not bytes that somebody has chosen to deceive it."""
    is_whole: bool = False
    """The part is the whole object: a longer object is an error too."""


@dataclass(frozen=True)
class Request:
    """One read that answers several ranges; `members` are their places in the sequence that was asked for."""

    name: str
    offset: int
    length: int | None
    members: tuple[int, ...]


def coalesce(ranges: Sequence[ByteRange], max_gap: int, max_length: int) -> list[Request]:
    """Requests that cover `ranges`, joining neighbours of one object.

    Args:
        max_gap: unwanted bytes between two ranges that are read along, at most.
        max_length: bytes of a joined request, at most; a single longer range stays one request.
    """
    requests: list[Request] = []
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i].name, ranges[i].offset, ranges[i].length or 0))
    for index in order:
        wanted = ranges[index]
        if wanted.length is None or wanted.is_whole:
            requests.append(Request(wanted.name, wanted.offset, None, (index,)))
            continue
        last = requests[-1] if requests else None
        if last is not None and last.name == wanted.name and last.length is not None:
            end = max(last.offset + last.length, wanted.offset + wanted.length)
            gap = wanted.offset - (last.offset + last.length)
            if gap <= max_gap and end - last.offset <= max_length:
                requests[-1] = Request(last.name, last.offset, end - last.offset, (*last.members, index))
                continue
        requests.append(Request(wanted.name, wanted.offset, wanted.length, (index,)))
    return requests
