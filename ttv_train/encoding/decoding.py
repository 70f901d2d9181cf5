"""Clips decoded ahead by several processes while the device encodes."""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from ttv_train.config import DatasetConfig
from ttv_train.data.cut import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.probe import BadVideoError
from ttv_train.data.units import WorkUnit

MAX_PIXELS_PER_BATCH = 49 * 480 * 720
"""Small clips go through the VAE together, up to as many pixels as one clip of CogVideoX has,"""
MAX_CLIPS_PER_BATCH = 4
"""but not more than these, so that the first batch is soon decoded."""

DecodeResult = torch.Tensor | BadVideoError


@dataclass
class DecodedBatch:
    """Clips of one unit and one bucket that go through the encoder together."""

    unit: WorkUnit
    is_last: bool
    """Whether it is the unit's last."""
    clips: list[tuple[str, Clip]]
    futures: list["Future[DecodeResult]"] = field(default_factory=list)

    def results(self) -> list[DecodeResult]:
        """uint8 (T, H, W, 3) per clip, or why there is none. Waits for them."""
        return [future.result() for future in self.futures]


class DecodeAhead:
    """Iterates over the batches of units, of which up to `num_ahead` are decoded before they are asked for. At the end
    of the context nothing is left running.

    Args:
        config: of the clips.
        units: taken one after another, on a thread of their own, which may wait.
        num_workers: decoder processes.
        num_ahead: batches.
        make_decoder: opens a decoder; called once per worker.
    """

    def __init__(
        self,
        config: DatasetConfig,
        units: Iterable[WorkUnit],
        num_workers: int,
        num_ahead: int,
        make_decoder: Callable[[DatasetConfig], ClipDecoder] = ClipDecoder,
    ) -> None:
        self._config, self._units, self._make_decoder = config, units, make_decoder
        self._batches: queue.Queue[DecodedBatch | BaseException | None] = queue.Queue(num_ahead)
        self._local = threading.local()
        self._decoders: list[ClipDecoder] = []
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")
        self._stop = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="claims", daemon=True)

    def __enter__(self) -> Self:
        self._feeder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        self._feeder.join()
        for decoder in self._decoders:
            decoder.close()

    def __iter__(self) -> Iterator[DecodedBatch]:
        while True:
            item = self._batches.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _feed(self) -> None:
        try:
            for unit in self._units:
                for batch in batches_of(unit):
                    if self._stop.is_set():
                        return
                    batch.futures = [self._pool.submit(self._decode, clip) for _, clip in batch.clips]
                    if not self._put(batch):
                        return
            self._put(None)
        except RuntimeError as error:
            if not self._stop.is_set():  # otherwise the pool has been shut down meanwhile
                self._put(error)
        except Exception as error:
            self._put(error)

    def _put(self, item: DecodedBatch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._batches.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _decode(self, clip: Clip) -> DecodeResult:
        decoder = getattr(self._local, "decoder", None)
        if decoder is None:
            decoder = self._local.decoder = self._make_decoder(self._config)
            self._decoders.append(decoder)
        try:
            return decoder.decode(clip)
        except BadVideoError as error:
            return error


def batches_of(unit: WorkUnit) -> Iterator[DecodedBatch]:
    """The unit's clips in batches of one bucket. They do not depend on which clips turn out to be bad, nor on who
    encodes the unit, so that equal units come to equal bytes."""
    batch: list[tuple[str, Clip]] = []
    for key, clip in unit.clips:
        most = min(MAX_CLIPS_PER_BATCH, MAX_PIXELS_PER_BATCH // math.prod(clip.bucket))
        if batch and (batch[0][1].bucket != clip.bucket or len(batch) >= most):
            yield DecodedBatch(unit, False, batch)
            batch = []
        batch.append((key, clip))
    yield DecodedBatch(unit, True, batch)
