"""Samples that ranks read for each other: each sample is read by the rank that owns it and sent to the others.

All of them ask for the same samples, though not at the same time, since each has threads of its own. A sample that its
owner cannot read is a corrupt one on all of them.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from ttv_train.data.dataset import LatentDataset
from ttv_train.data.sample_messages import pack_results, unpack_results
from ttv_train.data.shards import LatentEntry, SampleReads, SampleResult
from ttv_train.parallel.messages import receive_message, send_message

GRACE_SECONDS = 10.0
"""How long a rank that closes the dataset waits for the others to do so."""


class SharedDataset(SampleReads):
    """Implements `LatentDataset` on the ranks of a group.

    Args:
        dataset: says on every rank what there is; owners read from it.
        group: of gloo.
        owners: the ranks of the group to whom the samples are dealt.
        help: runs meanwhile on a thread of its own; it must end when the owners have closed their datasets.
    """

    def __init__(
        self,
        dataset: LatentDataset,
        group: dist.ProcessGroup,
        owners: Sequence[int],
        help: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.fingerprint = dataset.path, dataset.fingerprint
        self.normalization, self.num_quarantined = dataset.normalization, dataset.num_quarantined
        self.entries, self.joins_reads = dataset.entries, dataset.joins_reads
        self._dataset, self._group, self._rank = dataset, group, group.rank()
        self._owners, self._is_owner = owners, self._rank in owners
        self._by_key = {entry.key: entry for entry in self.entries}
        self._owner_of = {entry.key: owners[place % len(owners)] for place, entry in enumerate(self.entries)}
        self._sending = threading.Lock()
        self._has_sent_end = False
        self._arrived: defaultdict[str, deque[SampleResult]] = defaultdict(deque)
        self._ends: dict[int, Exception] = {}
        """Why no more samples come, by owner."""
        self._changed = threading.Condition()
        others = [owner for owner in owners if owner != self._rank]
        tasks: list[tuple[Callable[[], None], Sequence[int]]] = [
            (partial(self._receive, owner), [owner]) for owner in others
        ]
        tasks += [] if help is None else [(help, owners)]
        self._threads = [threading.Thread(target=self._run, args=task, daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """See `LatentDataset.read_many`. What it raises on an owner, it raises on the other ranks as a RuntimeError."""
        # A rank never waits before it has read and sent its own: the others may be waiting for those.
        own = iter(self._read_own([entry for entry in entries if self._owner_of[entry.key] == self._rank]))
        return [
            next(own) if self._owner_of[entry.key] == self._rank else self._wait_for(entry.key) for entry in entries
        ]

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        return self._dataset.null_prompt()

    def close(self) -> None:
        """See `LatentDataset.close`. Until the owners close theirs too, this rank helps them."""
        self._finish(self._owners, RuntimeError("the dataset is closed"))
        if self._is_owner:
            self._dataset.close()
            self._send_end("the dataset is closed")
        for thread in self._threads:
            thread.join(GRACE_SECONDS)

    def _read_own(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        if not entries:
            return []
        try:
            results = self._dataset.read_many(entries)
        except Exception as error:
            self._send_end(f"{type(error).__name__}: {error}")
            raise
        self._send(*pack_results(entries, results))
        return results

    def _wait_for(self, key: str) -> SampleResult:
        with self._changed:
            arrived, owner = self._arrived[key], self._owner_of[key]
            while not arrived and owner not in self._ends:
                self._changed.wait()
            if not arrived:
                raise RuntimeError(f"no more samples come from the rank that reads them: {self._ends[owner]}")
            return arrived.popleft()

    def _send(self, header: dict[str, object], content: bytes = b"") -> None:
        with self._sending:
            if not self._has_sent_end:
                self._has_sent_end = "end" in header
                for peer in range(self._group.size()):
                    if peer != self._rank:
                        send_message(self._group, peer, header, content)

    def _send_end(self, reason: str) -> None:
        with suppress(RuntimeError):  # a rank that is gone
            self._send({"end": reason})

    def _receive(self, owner: int) -> None:
        while True:
            header, content = receive_message(self._group, owner)
            if "end" in header:
                return self._finish([owner], RuntimeError(header["end"]))
            with self._changed:
                for key, result in unpack_results(header, content, self._by_key):
                    self._arrived[key].append(result)
                self._changed.notify_all()

    def _run(self, task: Callable[[], None], owners: Sequence[int]) -> None:
        try:
            task()
        except Exception as error:
            self._finish(owners, error)

    def _finish(self, owners: Sequence[int], end: Exception) -> None:
        with self._changed:
            for owner in owners:
                self._ends.setdefault(owner, end)
            self._changed.notify_all()
