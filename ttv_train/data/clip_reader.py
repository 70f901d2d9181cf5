"""Clips decoded and encoded one at a time, as they are asked for."""

import threading
from contextlib import suppress

import torch

from ttv_train.config import RunConfig
from ttv_train.data.cut import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.keyed_clips import sample_of
from ttv_train.data.probe import BadVideoError
from ttv_train.data.shards import CorruptSampleError, LatentEntry, SampleResult
from ttv_train.devices import get_backend
from ttv_train.encoders.clip_encoder import ClipEncoder, NonFiniteError
from ttv_train.encoders.followers import EncodingGroup


class ClipReader:
    """The decoder and the encoders of a run. Several threads decode at once; one at a time encodes.

    The device encodes on a stream of its own, beside the training step. What comes of it lies in host memory, so nobody
    has to wait for that stream: the copy from the device has done so.

    Args:
        config: of the run.
        device: of the encoders.
        group: ranks that encode each clip together; the first one reads, the others `follow`.
    """

    def __init__(self, config: RunConfig, device: torch.device, group: EncodingGroup | None = None) -> None:
        self.encoder = ClipEncoder(config.vae, config.text_encoder, device, config.first_frame, group)
        self._config, self._device = config.dataset, device
        backend = get_backend(device.type)
        backend.synchronize()  # what the encoders hold by now was made on another stream
        self._stream = backend.side_stream()
        self._encoding = threading.Lock()
        self._is_closed = False
        self._local = threading.local()

    def read(self, entry: LatentEntry, clip: Clip) -> SampleResult:
        """Decodes and encodes one clip; if that fails, its CorruptSampleError."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = ClipDecoder(self._config)
        try:
            video = self._local.decoder.decode(clip)
        except BadVideoError as error:
            return CorruptSampleError(entry.key, clip.source.name, str(error))
        with self._encoding, self._stream:
            if self._is_closed:
                raise RuntimeError("the dataset is closed")
            (encoded,) = self.encoder.encode([video], [clip.source.caption])
        if isinstance(encoded, NonFiniteError):
            return CorruptSampleError(entry.key, clip.source.name, str(encoded))
        return sample_of(entry, encoded)

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        with self._encoding, self._stream:
            return self.encoder.encode_null_prompt()

    def follow(self) -> None:
        """On the other ranks of the group: shares the work on the clips of the first one until it closes its reader."""
        with get_backend(self._device.type).side_stream():
            self.encoder.follow()

    def close(self) -> None:
        """Waits for the clip that is being encoded, and has other reads fail."""
        with self._encoding:
            if not self._is_closed:
                with suppress(RuntimeError):  # a rank that is gone
                    self.encoder.dismiss_followers()
            self._is_closed = True
