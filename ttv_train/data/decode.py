"""Decodes untrusted videos in a disposable child process: a bad file costs one clip and nothing else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from ttv_train.config import DatasetConfig
from ttv_train.data.decode_worker import END, INFO
from ttv_train.data.decoder_process import DecoderProcess, ProcessDiedError
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import BadVideoError, VideoInfo
from ttv_train.data.video_bytes import VideoBytes

if TYPE_CHECKING:
    from ttv_train.data.cut import Clip


FILES_PER_PROCESS = 500
"""Libraries and the allocator keep a little of every file they open; a new child every now and then keeps none."""


def exact(number: float) -> Fraction:
    """The ratio that a float of the config or of a clip stands for: 29.97 is 2997/100."""
    return Fraction(number).limit_denominator(1_000_000)


class DecoderFailedError(BadVideoError):
    """The decoder crashed or took too long over a file. Another time it might not."""


class ClipDecoder:
    """Probes and decodes videos in a child process with limits on memory, CPU time and wall-clock time.

    The child is started when it is first needed and serves request after request. When it crashes, hangs or grows too
    large, the file at hand is bad, and the next request gets a new child. Not to be shared between threads.
    """

    def __init__(self, config: DatasetConfig) -> None:
        self._config = config
        self._process: DecoderProcess | None = None
        self._bytes = VideoBytes()
        self._num_files = 0
        self._last_source: VideoSource | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sha256(self, source: VideoSource) -> str:
        """SHA-256 of a video's bytes, in hex. Raises BadVideoError if they cannot be read."""
        return self._bytes.sha256(source)

    def close(self) -> None:
        """Ends the child. A further request starts another."""
        self._bytes.close()
        if self._process is not None:
            self._process.kill()
            self._process = None

    def probe(self, source: VideoSource) -> VideoInfo:
        """What a video holds. Raises BadVideoError with the reason if it is not usable."""
        with self._request(source, None) as process:
            fields = json.loads(process.receive(INFO))
        fields |= {name: Fraction(fields[name]) for name in ("last_time", "time_base")}
        return VideoInfo(**fields)

    def decode(self, clip: "Clip") -> torch.Tensor:
        """The frames of a clip: uint8 (T, H, W, 3), RGB, upright, resized and centre-cropped to its bucket.

        Frame k is the one that a player shows at `clip.start_seconds` + k / `clip.fps`.

        Raises:
            BadVideoError: with the reason: the file is damaged where the clip lies, or its decoder failed.
        """
        return self.decode_range(clip.source, exact(clip.start_seconds), exact(clip.fps), clip.bucket)

    def decode_range(
        self, source: VideoSource, start: Fraction, fps: Fraction, shape: tuple[int, int, int]
    ) -> torch.Tensor:
        """Frames of a video: `shape` is (T, H, W), else as `decode`."""
        wanted = {"start": str(start), "fps": str(fps), "shape": shape}
        video = torch.empty(*shape, 3, dtype=torch.uint8)
        with self._request(source, wanted) as process:
            for frame in video.numpy():
                process.receive_frame(frame.data.cast("B"))
            process.receive(END)
        return video

    @contextmanager
    def _request(self, source: VideoSource, clip: dict[str, Any] | None) -> Iterator[DecoderProcess]:
        """Sends a request; in the body its answer is received."""
        timeout = self._config.decode_timeout_seconds
        path = self._bytes.path(source)
        if source != self._last_source:
            self._last_source, self._num_files = source, self._num_files + 1
        if self._process is not None and self._num_files > FILES_PER_PROCESS:
            self._process.kill()
            self._process = None
        if self._process is None:
            self._num_files = 1
            self._process = DecoderProcess.start(self._config.decoder)
        request = {
            "path": path,
            "span": source.span,
            "clip": clip,
            "max_pixels": self._config.max_pixels,
            "max_seconds": self._config.max_video_seconds,
            "cpu_seconds": timeout,
        }
        try:
            self._process.send(request, timeout)
            yield self._process
        except BadVideoError:
            raise
        except TimeoutError:
            self.close()
            raise DecoderFailedError(f"decoding took longer than dataset.decode_timeout_seconds {timeout:g}") from None
        except ProcessDiedError as error:
            self.close()
            raise DecoderFailedError(str(error)) from None
        except BaseException:
            # The child is in the middle of an answer that the next request must not read.
            self.close()
            raise
