"""One thread per process: tests start many processes, and a forked child of a process with a thread pool can hang in
torch's next parallel loop. Set before torch is imported."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
