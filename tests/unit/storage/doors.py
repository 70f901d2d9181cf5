"""A door whose answers a test decides."""

import hashlib
from collections.abc import Callable

from ttv_train.storage.batched import BatchedReads
from ttv_train.storage.ranges import ByteRange

CONTENT = bytes(range(256)) * 4


class ScriptedDoor:
    """Holds `objects`; each read first calls the next of `faults`, which may raise or give other bytes."""

    tier = "remote"

    def __init__(self, objects: dict[str, bytes] | None = None, faults: list[Callable[[bytes], bytes]] = ()) -> None:
        self.url = "scripted://host"
        self.objects = {"a": CONTENT} if objects is None else objects
        self.faults = list(faults)
        self.reads: list[tuple[str, int, int | None]] = []

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        self.reads.append((name, offset, length))
        fault = self.faults.pop(0) if self.faults else None
        if name not in self.objects:
            raise FileNotFoundError(name)
        content = self.objects[name][offset:] if length is None else self.objects[name][offset : offset + length]
        return content if fault is None else fault(content)

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def exists(self, name: str) -> bool:
        return name in self.objects

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data


def failing(error: OSError) -> Callable[[bytes], bytes]:
    """A fault that raises."""

    def fault(content: bytes) -> bytes:
        raise error

    return fault


def batched(door: ScriptedDoor, max_gap: int = 0, max_length: int = 2**20) -> BatchedReads:
    return BatchedReads(door, threads=4, max_gap=max_gap, max_length=max_length)


def part(offset: int, length: int, name: str = "a", content: bytes = CONTENT) -> ByteRange:
    """A range with the digest of what `content` has there."""
    return ByteRange(name, offset, length, hashlib.sha256(content[offset : offset + length]).hexdigest())
