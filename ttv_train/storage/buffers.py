"""Memory that reads use again. Touching fresh pages costs more than copying a file's bytes into them, and the C library
gives large blocks back to the kernel as soon as they are free."""

import weakref
from collections import defaultdict, deque

import numpy as np

SIZE_STEP = 2**18
"""Buffers of about the same size serve one another."""
MAX_KEPT_BYTES = 64 * 2**20


class BufferPool:
    """Lends memory; it comes back by itself once no view or tensor of it is left. Safe to share between threads.

    Nothing is locked, because memory may come back while the garbage collector interrupts any line of this class:
    only single operations of a deque change what is kept.
    """

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._kept: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)

    def take(self, length: int) -> memoryview:
        """`length` writable bytes of any content, which nobody else has."""
        size = -(-length // SIZE_STEP) * SIZE_STEP
        if length < SIZE_STEP or size > self._max_kept_bytes:
            return np.empty(length, dtype=np.uint8).data
        try:
            memory = self._kept[size].pop()
        except IndexError:
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:length]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data

    def kept_bytes(self) -> int:
        """Of the memory that waits for its next use."""
        return sum(size * len(kept) for size, kept in list(self._kept.items()))

    def _give_back(self, memory: np.ndarray) -> None:
        if self.kept_bytes() + len(memory) <= self._max_kept_bytes:
            self._kept[len(memory)].append(memory)
