"""summary.json: what a run came to, from its metrics.jsonl, so that it spans every restart of the run."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttv_train.config import RunConfig
from ttv_train.monitor.metrics import read_metrics
from ttv_train.storage.partial import write_text


def write_summary(
    run_folder: Path,
    config: RunConfig,
    *,
    world_size: int,
    peak_memory_bytes: int,
    clips: dict[str, int],
    storage: dict[str, Any],
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
    phases = sorted({phase for record in train for phase in record["step_seconds"]})
    summary = {
        "world_size": world_size,
        "sequence_parallel": config.parallel.sequence.model_dump(include={"scheme", "degree"}),
        "steps": max((record["step"] for record in records), default=0),
        "train_loss": _first_and_last(train),
        "validation_loss": _first_and_last(validation),
        "frames_per_second": _median(record["frames_per_second"] for record in train),
        "tokens_per_second": _median(record["tokens_per_second"] for record in train),
        "step_seconds": {
            phase: _median(record["step_seconds"].get(phase, 0.0) for record in train) for phase in phases
        },
        "peak_memory_bytes": peak_memory_bytes,
        "clips": clips,
        "storage": storage,
    }
    write_text(run_folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def describe(summary: Mapping[str, Any]) -> str:
    """One line for a person, without the full stop."""
    losses = {
        kind: [_shown(summary[kind][end], ".4f") for end in ("first", "last")]
        for kind in ("train_loss", "validation_loss")
    }
    return (
        f"{summary['steps']} steps on {summary['world_size']} process(es): training loss "
        f"{' -> '.join(losses['train_loss'])}, validation loss {' -> '.join(losses['validation_loss'])}, "
        f"{_shown(summary['frames_per_second'], '.1f')} frames/s"
    )


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _first_and_last(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """None where nothing was recorded or the loss was not finite."""
    return {"first": records[0]["loss"] if records else None, "last": records[-1]["loss"] if records else None}


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
