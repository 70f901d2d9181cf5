"""What a rank does that encodes for those that train."""

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from ttv_train.data.clip_reader import ClipReader
from ttv_train.data.keyed_clips import entry_of
from ttv_train.data.sample_messages import CLIPS, pack_results
from ttv_train.data.shards import LatentEntry, SampleResult, pack_null_prompt
from ttv_train.errors import UserError
from ttv_train.parallel.encoder_ranks import TRAINER
from ttv_train.parallel.messages import receive_message, send_message

REQUESTS_AT_A_TIME = 4
"""Of each rank that trains: one is encoded while the others are decoded."""


def serve(reader: ClipReader, links: Sequence[dist.ProcessGroup]) -> None:
    """Answers the requests of `links` until all of them are closed.

    Raises:
        RuntimeError: a rank that trains is gone.
    """
    with ThreadPoolExecutor(len(links)) as pool:
        for served in [pool.submit(_serve, reader, link) for link in links]:
            served.result()


def _serve(reader: ClipReader, link: dist.ProcessGroup) -> None:
    closed = threading.Event()
    answers: queue.SimpleQueue[Future[tuple[dict[str, Any], bytes]] | None] = queue.SimpleQueue()

    def send_answers() -> None:
        while (answer := answers.get()) is not None:
            send_message(link, TRAINER, *answer.result())
        send_message(link, TRAINER, {"end": True})

    with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send_answers)
        try:
            while "close" not in (request := receive_message(link, TRAINER)[0]):
                answers.put(pool.submit(_answer, reader, request, closed))
        finally:
            closed.set()
            answers.put(None)
        sending.result()


def _answer(reader: ClipReader, request: Mapping[str, Any], closed: threading.Event) -> tuple[dict[str, Any], bytes]:
    try:
        if "about" in request:
            return {"fingerprints": reader.encoder.fingerprints}, pack_null_prompt(*reader.null_prompt())
        entries: list[LatentEntry] = []
        results: list[SampleResult] = []
        for key, clip in CLIPS.validate_python(request["clips"]):
            if closed.is_set():
                break
            entries.append(entry_of(key, clip, reader.encoder))
            results.append(reader.read(entries[-1], clip))
        return pack_results(entries, results)
    except Exception as error:
        is_user_error = isinstance(error, UserError)
        message = str(error) if is_user_error else f"on an encoder rank, {type(error).__name__}: {error}"
        return {"error": message, "is_user_error": is_user_error}, b""
