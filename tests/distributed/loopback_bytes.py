"""Prints, for every scheme, the bytes that `collectives` counted and those that the kernel carried over the loopback.

Runs in a network namespace of its own; see test_bytes.py.
"""

import fcntl
import json
import socket
import struct
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.attention_cases import AttentionCase, make_inputs, run_attention
from tests.distributed.schemes import SCHEMES, build_scheme
from tests.harness import run_ranks
from ttv_train.parallel import collectives

CASE = AttentionCase(tokens=510, heads=8, channels=64, batch=1, text_lengths=(64,), dtype=torch.float32)
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def _loopback_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _measure(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    inputs = make_inputs(CASE)
    results = {}
    for name in SCHEMES:
        sequence = build_scheme(name)
        # The first round opens connections and compares shapes.
        run_attention(sequence, inputs)
        dist.barrier()
        collectives.reset()
        before = _loopback_bytes()
        dist.barrier()
        run_attention(sequence, inputs)
        dist.barrier()
        carried = _loopback_bytes() - before
        dist.barrier()
        counted = torch.tensor(sum(count["bytes"] for count in collectives.snapshot().values()))
        dist.all_reduce(counted)
        results[name] = (int(counted), carried)
    return results


if __name__ == "__main__":
    _start_loopback()
    print(json.dumps(run_ranks(4, _measure)[0]))
