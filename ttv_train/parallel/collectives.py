"""Collectives that count what they send.

Every exchange of activations goes through here, so that calls, bytes and seconds are known by purpose. Bytes are those
that leave this rank for other ranks; what a rank "sends" to itself is a local copy and counts nothing. Seconds are
what this process spent starting and awaiting transfers: on a CPU that is the time communication costs, on an
accelerator transfers run on a stream of their own and only what the host waits for shows up here.

Ranks must agree on every size. gloo does not notice when a message is shorter than the receiver expects, and aborts
the process when it is longer, so the callers compare their shapes first (`SequenceParallel`); what remains, such as a
rank that never arrives, ends in an error on every rank after the process group's timeout.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """What one purpose has cost on this rank."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


_traffic: dict[str, Traffic] = {}


def snapshot() -> dict[str, dict[str, float]]:
    """Calls, bytes sent and seconds by purpose since the last `reset`, as plain numbers."""
    return {purpose: asdict(traffic) for purpose, traffic in _traffic.items()}


def reset() -> None:
    """Forgets all counts."""
    _traffic.clear()


def _count(purpose: str, calls: int, num_bytes: int) -> None:
    traffic = _traffic.setdefault(purpose, Traffic())
    traffic.calls += calls
    traffic.bytes += num_bytes


@contextmanager
def _timed(purpose: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        _traffic.setdefault(purpose, Traffic()).seconds += time.perf_counter() - start


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    group: dist.ProcessGroup,
    purpose: str,
) -> None:
    """Sends the j-th piece of `input` to rank j of `group` and fills the i-th piece of `output` from rank i.

    Args:
        output, input: contiguous, of one dtype; taken as flat.
        output_sizes, input_sizes: elements per piece, one for each rank; they may differ and may be 0.
    """
    rank = dist.get_rank(group)
    sent = sum(input_sizes) - input_sizes[rank]
    _count(purpose, 1, sent * input.element_size())
    with _timed(purpose):
        dist.all_to_all_single(output.view(-1), input.view(-1), list(output_sizes), list(input_sizes), group=group)


@dataclass
class Transfer:
    """Point-to-point messages under way. Their tensors are kept until `wait` returns."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]
    purpose: str

    def wait(self) -> None:
        """Returns when what was to be received is there and what was sent may be overwritten."""
        with _timed(self.purpose):
            for work in self.works:
                work.wait()
        self.works.clear()
        self.tensors.clear()


def start_transfer(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
    purpose: str,
) -> Transfer:
    """Starts sending and receiving contiguous tensors, each paired with a rank of `group`.

    Empty tensors are not sent at all; both sides know their size.
    """
    operations = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends if tensor.numel()
    ]
    _count(purpose, len(operations), sum(operation.tensor.nbytes for operation in operations))
    operations += [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives if tensor.numel()
    ]
    with _timed(purpose):
        works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(works, [operation.tensor for operation in operations], purpose)


def all_gather(input: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> torch.Tensor:
    """Stacks the equally shaped `input` of every rank: `(degree, *input.shape)`."""
    degree = dist.get_world_size(group)
    output = input.new_empty((degree, *input.shape))
    _count(purpose, 1, (degree - 1) * input.nbytes)
    with _timed(purpose):
        dist.all_gather(list(output.unbind()), input.contiguous(), group=group)
    return output


def all_gather_rows(
    output: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, purpose: str
) -> Transfer:
    """Starts gathering every rank's `rows` into `output`, rank after rank; ranks may hold different numbers of rows.

    Args:
        output: (sum(sizes), ...), contiguous; complete after `wait` on the result.
        rows: (sizes[rank], ...), contiguous.
    """
    rank = dist.get_rank(group)
    pieces = output.split(list(sizes))
    pieces[rank].copy_(rows)
    peers = [peer for peer in range(len(sizes)) if peer != rank]
    return start_transfer([(rows, peer) for peer in peers], [(pieces[peer], peer) for peer in peers], group, purpose)
