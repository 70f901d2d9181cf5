"""Sequence parallelism side by side with other libraries: time, bytes, memory and error of one attention layer.

    python tools/bench/sequence_parallel.py --degree 2 3 4                  # on the loopback
    python tools/bench/sequence_parallel.py --degree 2 3 4 --rate 400mbit   # on a slow link, where time follows bytes
    python tools/bench/sequence_parallel.py --world-size-64                 # bytes at 64 ranks, by torch's fake backend

It runs in a network namespace of its own (root, or a kernel that lets users have one), so that the kernel's count of
loopback bytes is the benchmark's own; `--rate` limits that loopback by a token bucket. See
requirements-sequence-parallel.txt for what it compares with; what is not installed is shown as that.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from sequence_parallel_peers import PEERS

from ttv_train.config import SequenceParallelConfig
from ttv_train.parallel.sequence import build_sequence_parallel
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.traffic import AttentionShape, attention_bytes
from ttv_train.verify.ranks import run_ranks

BATCH, TOKENS, HEADS, CHANNELS = 1, 1020, 12, 64
FRAMES = 12
WARMUP, ROUNDS = 2, 9
TOLERANCE = 1e-4
"""Largest error of outputs and gradients, in float32 against float64, beyond which a contender is shown as wrong."""


def ours(scheme: str, degree: int) -> dict[str, dict[str, Any]]:
    """Settings of our contenders of a scheme."""
    settings: dict[str, Any] = {"scheme": scheme, "degree": degree}
    if scheme == "ring":
        return {f"ours, {mode}": settings | {"ring_mode": mode} for mode in ("rotate", "gather")}
    if scheme == "usp":
        settings |= {"ulysses_degree": 2}
        return {f"ours, {mode}": settings | {"ring_mode": mode} for mode in ("rotate", "gather")}
    return {"ours": settings}


def our_attention(settings: dict[str, Any]) -> Callable[..., torch.Tensor]:
    sequence = build_sequence_parallel(SequenceParallelConfig.model_validate(settings), dist.group.WORLD)
    sequence.record_length(TOKENS)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = sequence.attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)

    return attend


def inputs() -> list[torch.Tensor]:
    """Query, key, value and gradient of the output, (B, S, H, D), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, TOKENS, HEADS, CHANNELS, generator=generator) for _ in range(4)]


def reference() -> list[torch.Tensor]:
    """Output and gradients of query, key and value in float64, in one process."""
    *qkv, grad = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def loopback_bytes() -> int:
    """Bytes that the loopback of this namespace has carried."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def peak_bytes(step: Callable[[], object]) -> int:
    """Highest memory that torch's CPU allocator holds during a step, above what it holds before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def build(rank: int, degree: int, scheme: str, name: str) -> Callable[..., torch.Tensor]:
    settings = ours(scheme, degree).get(name)
    return our_attention(settings) if settings is not None else PEERS[scheme][name](rank, degree)


def make_step(attend: Callable[..., torch.Tensor], rank: int, degree: int) -> Callable[[], list[torch.Tensor]]:
    own = slice(rank * TOKENS // degree, (rank + 1) * TOKENS // degree)
    *qkv, grad = (x[:, own].contiguous() for x in inputs())
    leaves = [x.requires_grad_() for x in qkv]

    def step() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = attend(*leaves)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    return step


def check(rank: int, degree: int, scheme: str, name: str) -> float:
    """Largest error of a contender."""
    own = slice(rank * TOKENS // degree, (rank + 1) * TOKENS // degree)
    found = make_step(build(rank, degree, scheme, name), rank, degree)()
    return max(float((x.double() - y[:, own]).abs().max()) for x, y in zip(found, reference(), strict=True))


def compare(rank: int, degree: int, scheme: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Times contenders in turn, so that what else the machine does meets all of them."""
    steps = {name: make_step(build(rank, degree, scheme, name), rank, degree) for name in names}
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    for name, step in steps.items():
        for _ in range(WARMUP):
            step()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        step()
        time.sleep(0.1)
        dist.barrier()
        results[name]["bytes"] = (loopback_bytes() - before) / degree
        results[name]["peak"] = peak_bytes(step)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            results[name]["seconds"].append(time.perf_counter() - started)
    return results


def run_scheme(scheme: str, degree: int) -> None:
    """Prints a table of every contender of a scheme."""
    names = [*ours(scheme, degree), *PEERS[scheme]]
    errors: dict[str, float | str] = {}
    for name in names:
        try:
            errors[name] = max(run_ranks(degree, check, scheme, name))
        except Exception as error:
            errors[name] = f"cannot run: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    runnable = [name for name in names if isinstance(errors[name], float)]
    found = run_ranks(degree, compare, scheme, runnable)[0]
    right = [name for name in runnable if float(errors[name]) <= TOLERANCE]
    peers = [name for name in right if name in PEERS[scheme]]
    best = min((statistics.median(found[name]["seconds"]) for name in peers), default=float("nan"))
    print(f"\n### {scheme}, {degree} ranks\n")
    print("| | time / best peer | median (min-max) ms | bytes / formula | peak MB | error |\n|---|---|---|---|---|---|")
    for name in names:
        if name not in found:
            print(f"| {name} | {errors[name]} | | | | |")
            continue
        milliseconds = [1e3 * seconds for seconds in found[name]["seconds"]]
        median = statistics.median(milliseconds)
        wrong = "" if name in right else " **wrong**"
        formula = formula_bytes(ours(scheme, degree).get(name, next(iter(ours(scheme, degree).values()))))
        print(
            f"| {name} | {median / 1e3 / best:.2f} | {median:.0f} ({min(milliseconds):.0f}-{max(milliseconds):.0f}) | "
            f"{found[name]['bytes'] / formula:.2f} | {found[name]['peak'] / 1e6:.1f} | {errors[name]:.0e}{wrong} |"
        )
    sys.stdout.flush()


def formula_bytes(settings: dict[str, Any]) -> float:
    """Mean over the ranks, since the loopback carries the bytes of all of them."""
    config = SequenceParallelConfig.model_validate(settings)
    shape = AttentionShape(BATCH, TOKENS, HEADS, HEADS, CHANNELS, 4)
    return statistics.fmean(attention_bytes(config, rank, shape).total for rank in range(config.degree))


def spatial_temporal_pair(rank: int, degree: int) -> dict[str, dict[str, Any]]:
    """A spatial and a temporal attention layer of a factorised model: DSP, and Ulysses in one layer or in both."""
    locations = TOKENS // FRAMES

    def attend(x: torch.Tensor) -> torch.Tensor:
        """(B, groups, tokens, C): attention within each group."""
        qkv = x.unflatten(-1, (HEADS, CHANNELS)).flatten(0, 1).transpose(1, 2)
        return F.scaled_dot_product_attention(qkv, qkv, qkv).transpose(1, 2).flatten(2).view(x.shape)

    def shared(sequence: SequenceParallel, x: torch.Tensor, name: str) -> torch.Tensor:
        """(B, groups, local tokens, C)."""
        qkv = x.unflatten(-1, (HEADS, CHANNELS)).flatten(0, 1).transpose(1, 2)
        out, _ = sequence.attention(qkv, qkv, qkv, name=name)
        return out.transpose(1, 2).flatten(2).view(x.shape)

    def scheme(name: str) -> SequenceParallel:
        config = SequenceParallelConfig.model_validate({"scheme": name, "degree": degree})
        return build_sequence_parallel(config, dist.group.WORLD)

    dsp, ulysses = scheme("dsp"), scheme("ulysses")
    whole = torch.randn(BATCH, FRAMES, locations, HEADS * CHANNELS, generator=torch.Generator().manual_seed(1))
    leaf = dsp.shard(whole, 1).requires_grad_()
    ulysses.record_length(FRAMES, "frames")

    def by_dsp() -> torch.Tensor:
        x = attend(leaf)
        x = dsp.switch(x, 1, 2)
        x = attend(x.transpose(1, 2)).transpose(1, 2)
        return dsp.switch(x, 2, 1, "space", "tokens")

    def by_ulysses() -> torch.Tensor:
        return shared(ulysses, attend(leaf).transpose(1, 2), "frames").transpose(1, 2)

    def by_ulysses_in_both() -> torch.Tensor:
        # The sequence of all tokens is shared: spatial layers exchange too. Bytes and time of the exchange are those of
        # a second call over the same tensor.
        x = shared(ulysses, leaf.transpose(1, 2), "frames").transpose(1, 2)
        return shared(ulysses, x.transpose(1, 2), "frames").transpose(1, 2)

    results: dict[str, dict[str, Any]] = {}
    layouts = {"dsp": by_dsp, "ulysses, temporal": by_ulysses, "ulysses, both": by_ulysses_in_both}
    for name, function in layouts.items():
        for _ in range(WARMUP):
            function().sum().backward()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        function().sum().backward()
        time.sleep(0.1)
        dist.barrier()
        results[name] = {"bytes": (loopback_bytes() - before) / degree, "seconds": []}
    for _ in range(ROUNDS):
        for name, function in layouts.items():
            dist.barrier()
            started = time.perf_counter()
            function().sum().backward()
            dist.barrier()
            results[name]["seconds"].append(time.perf_counter() - started)
    return results


def run_pair(degree: int) -> None:
    found = run_ranks(degree, spatial_temporal_pair)[0]
    reference = found["dsp"]
    print(f"\n### spatial and temporal pair, {degree} ranks\n")
    print("| | bytes / dsp | time / dsp | median ms |\n|---|---|---|---|")
    for name, result in found.items():
        median = statistics.median(result["seconds"])
        print(
            f"| {name} | {result['bytes'] / reference['bytes']:.2f} | "
            f"{median / statistics.median(reference['seconds']):.2f} | {median * 1e3:.0f} |"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degree", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--scheme", nargs="+", choices=[*PEERS, "dsp"], default=[*PEERS, "dsp"])
    parser.add_argument("--rate", help="limit of the loopback, such as 400mbit")
    parser.add_argument("--world-size-64", action="store_true")
    options = parser.parse_args()
    if options.world_size_64:
        from sequence_parallel_64 import print_table

        print_table()
        return
    if "TTV_BENCH_NAMESPACE" not in os.environ:
        enter_namespace(options.rate)
    print(f"B {BATCH}, {TOKENS} tokens, {HEADS} heads of {CHANNELS}, float32, forward and backward; "
          f"{options.rate or 'unlimited'} loopback; {json.dumps({'torch': torch.__version__})}")  # fmt: skip
    for degree in options.degree:
        for scheme in options.scheme:
            if scheme == "dsp":
                run_pair(degree)
            elif scheme != "usp" or degree == 4:
                run_scheme(scheme, degree)


def enter_namespace(rate: str | None) -> None:
    """Starts this program again in a network namespace of its own."""
    limit = f"tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 400ms && " if rate else ""
    script = f'ip link set lo up && {limit}exec "$@"'
    environment = {**os.environ, "TTV_BENCH_NAMESPACE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = ["unshare", "--net", "bash", "-c", script, "bench", sys.executable, *sys.argv]
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
