"""Samples that one rank reads for several: the leader of a group reads, the others get what it has read.

All of them ask for the same samples, though not at the same time, since each has threads of its own. A sample that the
leader cannot read is a corrupt one on all of them.
"""

import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from ttv_train.data.dataset import LatentDataset
from ttv_train.data.sample_messages import pack_results, unpack_results
from ttv_train.data.shards import CorruptSampleError, LatentEntry, LatentSample, SampleResult
from ttv_train.parallel.messages import receive_message, send_message

GRACE_SECONDS = 10.0
"""How long a follower waits for its leader to close the dataset too."""


class SharedDataset(ABC):
    """What both sides have in common. Implements `LatentDataset`.

    Args:
        dataset: says on every rank what there is; only the leader reads from it.
        group: of gloo; rank 0 is the leader.
    """

    def __init__(self, dataset: LatentDataset, group: dist.ProcessGroup) -> None:
        self._dataset, self._group = dataset, group
        self.path, self.fingerprint = dataset.path, dataset.fingerprint
        self.normalization, self.num_quarantined = dataset.normalization, dataset.num_quarantined
        self.entries, self.joins_reads = dataset.entries, dataset.joins_reads

    def read(self, entry: LatentEntry) -> LatentSample:
        """One sample. Raises CorruptSampleError."""
        (result,) = self.read_many([entry])
        if isinstance(result, CorruptSampleError):
            raise result
        return result

    @abstractmethod
    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """See `LatentDataset.read_many`."""

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        return self._dataset.null_prompt()

    @abstractmethod
    def close(self) -> None:
        """See `LatentDataset.close`."""


class Leader(SharedDataset):
    """Reads, and sends what it has read to the other ranks."""

    def __init__(self, dataset: LatentDataset, group: dist.ProcessGroup) -> None:
        super().__init__(dataset, group)
        self._sending = threading.Lock()
        self._has_ended = False

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """See `LatentDataset.read_many`. What it raises, the reads of the other ranks raise too."""
        try:
            results = self._dataset.read_many(entries)
        except Exception as error:
            self._finish(f"{type(error).__name__}: {error}")
            raise
        self._send(*pack_results(entries, results))
        return results

    def close(self) -> None:
        """See `LatentDataset.close`."""
        self._dataset.close()
        self._finish("the dataset is closed")

    def _finish(self, reason: str) -> None:
        with suppress(RuntimeError):  # a rank that is gone
            self._send({"end": reason})

    def _send(self, header: dict[str, object], content: bytes = b"") -> None:
        with self._sending:
            if not self._has_ended:
                self._has_ended = "end" in header
                for peer in range(1, self._group.size()):
                    send_message(self._group, peer, header, content)


class Follower(SharedDataset):
    """Waits for what the leader has read.

    Args:
        help: runs on a thread of its own meanwhile, until the leader closes its dataset.
    """

    def __init__(
        self, dataset: LatentDataset, group: dist.ProcessGroup, help: Callable[[], None] | None = None
    ) -> None:
        super().__init__(dataset, group)
        self._by_key = {entry.key: entry for entry in self.entries}
        self._arrived: defaultdict[str, deque[SampleResult]] = defaultdict(deque)
        self._end: Exception | None = None
        self._changed = threading.Condition()
        tasks = [self._receive] if help is None else [self._receive, help]
        self._threads = [threading.Thread(target=self._run, args=(task,), daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """See `LatentDataset.read_many`. Raises RuntimeError when nothing more comes from the leader."""
        results: list[SampleResult] = []
        with self._changed:
            for entry in entries:
                arrived = self._arrived[entry.key]
                while not arrived and self._end is None:
                    self._changed.wait()
                if not arrived:
                    raise RuntimeError(f"no more samples come from the rank that reads them: {self._end}")
                results.append(arrived.popleft())
        return results

    def close(self) -> None:
        """See `LatentDataset.close`. Until the leader closes its dataset too, this rank helps it."""
        self._finish(RuntimeError("the dataset is closed"))
        for thread in self._threads:
            thread.join(GRACE_SECONDS)

    def _receive(self) -> None:
        while True:
            header, content = receive_message(self._group, 0)
            if "end" in header:
                return self._finish(RuntimeError(header["end"]))
            with self._changed:
                for key, result in unpack_results(header, content, self._by_key):
                    self._arrived[key].append(result)
                self._changed.notify_all()

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            self._finish(error)

    def _finish(self, end: Exception) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()
