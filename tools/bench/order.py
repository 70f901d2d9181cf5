"""Time and memory of one epoch's order and bucket batches, for a dataset of a million rows.

    python tools/bench/order.py [ROWS]

Rows are spread over 20 buckets and two sources. CPU time and peak memory of this process are printed; the memory
includes the interpreter, torch and the rows.
"""

import resource
import sys
import time

import numpy as np

from ttv_train.data.order import DataOrder

SIZES = ((480, 832), (832, 480), (640, 640), (720, 1280), (1280, 720))
BUCKETS = [(frames, *size) for frames in (1, 17, 49, 81) for size in SIZES]


def peak_memory_mb() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(rows: int) -> None:
    """Prints a line per way to draw an epoch."""
    rng = np.random.default_rng(0)
    buckets = [BUCKETS[number] for number in rng.integers(0, len(BUCKETS), rows)]
    sources = rng.integers(0, 2, rows).tolist()
    mixed = {"sources": sources, "weights": [3.0, 1.0]}
    print(f"{rows:,} rows, {len(BUCKETS)} buckets; before: {peak_memory_mb():.0f} MB")
    for name, options in (("one dataset", {}), ("two datasets, mixed 3 to 1", mixed)):
        started = time.process_time()
        order = DataOrder(buckets, seed=0, digest="bench", global_batch_size=64, **options)
        samples = sum(len(order.batch(step).indices) for step in range(order.batches_per_epoch))
        seconds = time.process_time() - started
        print(
            f"{name}: {samples:,} samples in {order.batches_per_epoch:,} batches, {seconds:.2f} s of CPU time, "
            f"peak {peak_memory_mb():.0f} MB"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
