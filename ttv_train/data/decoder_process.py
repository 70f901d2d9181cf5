"""The parent's end of one decoder process: start it, ask it, read its answer by a deadline, kill it."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from ttv_train.data.decode_worker import BAD_VIDEO, FRAME, HEADER, NOT_READY, READY
from ttv_train.data.decoders import DECODERS
from ttv_train.data.probe import BadVideoError
from ttv_train.errors import UserError

WORKER_MODULE = "ttv_train.data.decode_worker"
PACKAGE_ROOT = Path(__file__).parents[2]
START_TIMEOUT_SECONDS = 120.0
MAX_MESSAGE_BYTES = 1 << 20
PIPE_BYTES = 1 << 20
# Credentials and proxies in the environment are not for a process that parses hostile files.
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class ProcessDiedError(Exception):
    """The process ended in the middle of an answer, or answered what no sound process answers."""


class DecoderUnusableError(Exception):
    """The library cannot be loaded."""


REFUSALS = {NOT_READY: DecoderUnusableError, BAD_VIDEO: BadVideoError}
"""What is raised for an answer of that kind, whose payload is the reason."""


class DecoderProcess:
    """One child process; see `decode_worker` for what it does and how it answers.

    Args:
        decoder: name of the decoder, or `auto`.
    """

    def __init__(self, decoder: str) -> None:
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OPENBLAS_NUM_THREADS": "1"}
        # -P: the current folder is no place to import modules from. A session of its own: Ctrl-C is for the parent.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER_MODULE, decoder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, AttributeError):
            # A frame in few pieces; where the system allows less, or is not Linux, in more of them.
            fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._deadline = 0.0

    @classmethod
    def start(cls, decoder: str) -> Self:
        """Starts a process and waits until it is ready.

        Raises:
            UserError: the decoder's library cannot be used.
            RuntimeError: the process does not come up, whatever the file.
        """
        process = cls(decoder)
        process._deadline = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            process.receive(READY)
        except DecoderUnusableError as error:
            process.kill()
            package = DECODERS[decoder].package
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"dataset.decoder {decoder}: {package} cannot be used: {reason}; pip install 'ttv-train[{decoder}]', "
                "or choose pyav"
            ) from None
        except (ProcessDiedError, TimeoutError) as error:
            process.kill()
            raise RuntimeError(f"the decoder process does not start: {error}") from None
        return process

    def send(self, request: dict[str, Any], timeout_seconds: float) -> None:
        """Sends a request. From now on its whole answer has `timeout_seconds`."""
        self._deadline = time.monotonic() + timeout_seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise ProcessDiedError(self._how_it_ended()) from None

    def receive(self, expected_kind: bytes) -> bytes:
        """The payload of the next message.

        Raises:
            BadVideoError: the process answered that the file is bad.
            ProcessDiedError, TimeoutError: no sound answer came, or none in time; the process is to be killed.
        """
        kind, length = self._receive_header()
        if kind != expected_kind or length > MAX_MESSAGE_BYTES:
            raise ProcessDiedError(f"the decoder answered {kind!r} of {length} bytes instead of {expected_kind!r}")
        return self._receive_bytes(length)

    def receive_frame(self, view: memoryview) -> None:
        """Fills `view`, contiguous bytes, with the next message, which must be a frame of just that size.

        Raises as `receive`.
        """
        kind, length = self._receive_header()
        if kind != FRAME or length != view.nbytes:
            raise ProcessDiedError(f"the decoder answered {kind!r} of {length} bytes instead of a frame")
        self._receive_into(view)

    def kill(self) -> None:
        """Ends the process at once and reaps it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _receive_header(self) -> tuple[bytes, int]:
        kind, length = HEADER.unpack(self._receive_bytes(HEADER.size))
        if kind in REFUSALS and length <= MAX_MESSAGE_BYTES:
            raise REFUSALS[kind](self._receive_bytes(length).decode(errors="replace"))
        return kind, length

    def _receive_bytes(self, length: int) -> bytes:
        payload = bytearray(length)
        self._receive_into(memoryview(payload))
        return bytes(payload)

    def _receive_into(self, view: memoryview) -> None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while view.nbytes:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise TimeoutError
            count = os.readv(pipe, [view])
            if count == 0:
                raise ProcessDiedError(self._how_it_ended())
            view = view[count:]

    def _how_it_ended(self) -> str:
        # Its end of the pipe is closed, so it is ending; a process that only closed the pipe is ended here.
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "the decoder stopped answering"
        if code >= 0:
            return f"the decoder failed with exit code {code}"
        return f"the decoder crashed with {signal.Signals(-code).name}"
