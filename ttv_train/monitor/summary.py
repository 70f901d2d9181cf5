"""summary.json: what a run came to, from its metrics.jsonl, so that it spans every restart of the run."""

import json
import statistics
from pathlib import Path
from typing import Any

from ttv_train.config import RunConfig
from ttv_train.monitor.metrics import read_metrics


def write_summary(
    run_folder: Path, config: RunConfig, *, world_size: int, peak_memory_bytes: int, clips: dict[str, int]
) -> dict[str, Any]:
    """Writes `summary.json` in `run_folder` and returns it.

    Rates and phase times are medians over the steps, which leaves out the slow first ones. Seconds are wall-clock.

    Args:
        world_size: processes of the run's last part.
        peak_memory_bytes: the highest of any rank.
        clips: how many clips are `encoded` and how many files were `quarantined`.
    """
    records = read_metrics(run_folder)
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    phases = {phase for record in train for phase in record["step_seconds"]}
    summary = {
        "world_size": world_size,
        "sequence_parallel": config.parallel.sequence.model_dump(include={"scheme", "degree"}),
        "steps": train[-1]["step"],
        "train_loss": {"first": train[0]["loss"], "last": train[-1]["loss"]},
        "validation_loss": {"first": validation[0]["loss"], "last": validation[-1]["loss"]},
        "frames_per_second": statistics.median(record["frames_per_second"] for record in train),
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in train),
        "step_seconds": {
            phase: statistics.median(record["step_seconds"].get(phase, 0.0) for record in train)
            for phase in sorted(phases)
        },
        "peak_memory_bytes": peak_memory_bytes,
        "clips": clips,
    }
    (run_folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
