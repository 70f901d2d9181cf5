"""Messages of any length between two ranks, sent and received from any thread.

They go over a gloo group and stay in host memory, so that whoever waits for one keeps no device busy.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LONGEST_WAIT = timedelta(days=30)
"""A rank may have nothing to say for as long as a job lasts. One that is gone is noticed by its closed connection."""


def send_message(group: dist.ProcessGroup, peer: int, header: Mapping[str, Any], content: bytes = b"") -> None:
    """Sends JSON data and bytes to a rank of `group`. One thread at a time sends to the same rank.

    Raises:
        RuntimeError: the other rank is gone.
    """
    text = json.dumps(header).encode()
    body = torch.frombuffer(bytearray(text + content), dtype=torch.uint8)
    group.send([torch.tensor([len(text), len(content)])], peer, 0).wait(LONGEST_WAIT)
    group.send([body], peer, 0).wait(LONGEST_WAIT)


def receive_message(group: dist.ProcessGroup, peer: int) -> tuple[Any, bytes]:
    """The next message from a rank of `group`. One thread at a time receives from the same rank. Raises as
    `send_message` does."""
    sizes = torch.empty(2, dtype=torch.int64)
    group.recv([sizes], peer, 0).wait(LONGEST_WAIT)
    header_size, content_size = sizes.tolist()
    body = torch.empty(header_size + content_size, dtype=torch.uint8)
    group.recv([body], peer, 0).wait(LONGEST_WAIT)
    data = body.numpy().tobytes()
    return json.loads(data[:header_size]), data[header_size:]
