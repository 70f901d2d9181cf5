"""A trainer's requests to a rank of its job that encodes."""

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ttv_train.errors import UserError
from ttv_train.parallel.encoder_ranks import ENCODER
from ttv_train.parallel.messages import receive_message, send_message

GRACE_SECONDS = 10.0
"""How long a trainer that stops waits for an encoder to do so."""


class EncoderLink:
    """A trainer's end of a link. Requests come from several threads and are answered in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sending, self._changing = threading.Lock(), threading.Lock()
        self._pending: deque[Future[tuple[Any, bytes]]] = deque()
        self._end: str | None = None
        self._thread = threading.Thread(target=self._receive, name="encoder-link", daemon=True)
        self._thread.start()

    def ask(self, request: Mapping[str, Any]) -> tuple[Any, bytes]:
        """Header and content of the answer.

        Raises:
            UserError: the encoder raised it.
            RuntimeError: the encoder failed in another way or is gone, or the link is closed.
        """
        answer: Future[tuple[Any, bytes]] = Future()
        with self._sending:
            with self._changing:
                if self._end is not None:
                    raise RuntimeError(self._end)
                self._pending.append(answer)
            try:
                send_message(self._group, ENCODER, request)
            except RuntimeError as error:
                self._lose(error)
        header, content = answer.result()
        if "error" in header:
            raise (UserError if header["is_user_error"] else RuntimeError)(header["error"])
        return header, content

    def close(self) -> None:
        """Ends all requests with an error, and the encoder's work on them."""
        with self._sending:
            if self._finish("the dataset is closed"):
                with suppress(RuntimeError):  # it is gone
                    send_message(self._group, ENCODER, {"close": True})
        self._thread.join(GRACE_SECONDS)

    def _receive(self) -> None:
        try:
            while True:
                header, content = receive_message(self._group, ENCODER)
                if "end" in header:
                    return
                with self._changing:
                    if self._pending:
                        self._pending.popleft().set_result((header, content))
        except RuntimeError as error:
            self._lose(error)

    def _lose(self, error: RuntimeError) -> None:
        self._finish(f"an encoder rank is gone: {str(error).splitlines()[0]}")

    def _finish(self, reason: str) -> bool:
        """False if it was finished before."""
        with self._changing:
            if self._end is not None:
                return False
            self._end = reason
            while self._pending:
                self._pending.popleft().set_exception(RuntimeError(reason))
            return True
