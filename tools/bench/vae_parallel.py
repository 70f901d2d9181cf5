"""One long clip through a video VAE: two ranks in time mode against one rank.

    python tools/bench/vae_parallel.py [--frames 33] [--height 128] [--width 128] [--repeats 5]

A Wan VAE of reduced width with random weights, float32, one thread per rank. All ways of encoding take turns in one run
and see the same load. Wall time is the best of the repeats; CPU time is that of the rank that needed most. Speedups are
against the fastest way of one rank: in wall time, and in CPU time, which is what idle cores would make of it without
waiting for each other.
"""

import argparse
import time

import diffusers
import torch
import torch.distributed as dist

from ttv_train.encoders.vae.parallel import ParallelEncoder
from ttv_train.encoders.vae.split import TIME
from ttv_train.parallel import collectives
from ttv_train.verify.peak_memory import PeakMemory
from ttv_train.verify.ranks import run_ranks

SETTINGS = {"base_dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
DEGREE = 2


@torch.no_grad()
def measure(rank: int, world_size: int, size: tuple[int, int, int], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds, bytes sent, peak memory and largest difference by way of encoding, as this rank sees them."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(**SETTINGS).eval()
    video = torch.rand(1, 3, *size) * 2 - 1
    alone, both = dist.new_group([0]), dist.group.WORLD
    ways = {
        "`vae.encode`, 1 rank": (1, vae._encode),
        "time mode, 1 rank": (1, ParallelEncoder(vae, 4, 8, TIME, alone).moments),
        "time mode, 2 ranks": (2, ParallelEncoder(vae, 4, 8, TIME, both).moments),
        "time mode, 2 ranks, `chunk_latent_frames: 1`": (2, ParallelEncoder(vae, 4, 8, TIME, both, 1).moments),
    }
    expected = vae._encode(video)
    found: dict[str, dict[str, float]] = {}
    for way, (degree, encode) in ways.items():
        if rank < degree:
            collectives.reset()
            with PeakMemory() as memory:
                latents = encode(video)
            sent = sum(int(traffic["bytes"]) for traffic in collectives.snapshot().values())
            worst = float((latents - expected).abs().max())
            found[way] = {"wall": 1e9, "cpu": 1e9, "sent": sent, "peak": memory.peak_bytes, "difference": worst}
    for _ in range(repeats):
        for way, (degree, encode) in ways.items():
            dist.barrier()
            if rank < degree:
                wall, cpu = time.perf_counter(), time.process_time()
                encode(video)
                row = found[way]
                row["wall"] = min(row["wall"], time.perf_counter() - wall)
                row["cpu"] = min(row["cpu"], time.process_time() - cpu)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    size = (options.frames, options.height, options.width)
    ranks = run_ranks(DEGREE, measure, size, options.repeats)
    print("| | wall time | speedup | CPU time per rank | speedup | sent per rank | peak memory per rank | difference |")
    print("|---|---|---|---|---|---|---|---|")
    alone = [row for way, row in ranks[0].items() if way not in ranks[1]]
    serial_wall, serial_cpu = (min(row[name] for row in alone) for name in ("wall", "cpu"))
    for way in ranks[0]:
        rows = [found[way] for found in ranks if way in found]
        wall, cpu, sent, peak, worst = (max(row[name] for row in rows) for name in rows[0])
        print(
            f"| {way} | {wall:.2f} s | {serial_wall / wall:.2f} | {cpu:.2f} s | {serial_cpu / cpu:.2f} "
            f"| {sent / 1e6:.1f} MB | {peak / 2**20:.0f} MiB | {worst:.0e} |"
        )


if __name__ == "__main__":
    main()
