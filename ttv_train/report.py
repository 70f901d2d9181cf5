"""report.html: what a run did, in one file that needs nothing else.

It is made from what the run folder holds; every part may be missing.

    metrics.jsonl               records, see monitor/metrics.py
    samples/, references/       sampled videos, see monitor/samples.py
    summary.json                figures of the finished run, see monitor/summary.py
    config.resolved.yaml        the run's config
    quarantine.jsonl            one {name, reason, stage} per file that was left out
    environment.json            names and values of what the run ran on

The page allows its own script by hash.
"""

import base64
import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ttv_train.monitor.run_folder import Record, RunFolder, read_run
from ttv_train.monitor.samples import SampledVideo, step_folder
from ttv_train.monitor.step_timer import PHASES
from ttv_train.pages import write_page
from ttv_train.report_charts import Point, Series, format_number, line_chart, smooth, stacked_chart

PHASE_COLORS = {
    "data": "var(--c2)",
    "forward": "var(--c1)",
    "backward": "var(--c4)",
    "communication": "var(--c5)",
    "optimizer": "var(--c3)",
}
VIDEOS_PER_PROMPT = 6
"""Steps shown of one prompt: the first, the last, and some between."""
EMBEDDED_BYTES = 48 * 2**20
"""Videos beyond this total are named instead of embedded: a page of hundreds of megabytes does not open."""
TABLE_ROWS = 500
REFERENCE_LABEL = "the clip itself"


@dataclass(frozen=True)
class Video:
    """A video on the page."""

    label: str
    file: str
    data: str
    """Base64; empty if it is not embedded."""

    @property
    def is_reference(self) -> bool:
        return self.label == REFERENCE_LABEL


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` in a run folder, finished or not.

    Raises:
        UserError: the folder does not exist, or is not a run's.
    """
    run = read_run(run_dir)
    templates = files("ttv_train") / "templates"
    script = (templates / "report.js").read_text(encoding="utf-8")
    return write_page(
        run_dir / "report.html",
        "report.html",
        style=Markup((templates / "report.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        version=version("ttv-train"),
        written_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        name=run_dir.resolve().name,
        run_folder=str(run_dir),
        **overview(run),
        **videos(run),
        **curves(run),
        **step_time(run),
        **data(run),
        communication=communication(run),
        storage=storage(run),
        environment=list(run.environment.items()),
        config_text=run.config_text,
        summary_text=json.dumps(run.summary, indent=2, ensure_ascii=False) if run.summary else "",
        notes=run.notes,
    )


def overview(run: RunFolder) -> dict[str, Any]:
    """The head of the page: how far the run is, and its figures."""
    steps = max((record["step"] for record in [*run.train, *run.validation]), default=0)
    planned = _number(_get(run.config, "training", "steps"))
    finished = bool(run.summary) and planned is not None and steps >= planned
    status = f"finished, {steps} steps" if finished else f"step {steps}" + (f" of {planned:.0f}" if planned else "")
    first, last = _first_and_last(run.validation)
    headline = ""
    if first is not None and last is not None and len(run.validation) > 1:
        verb = "fell" if last < first else "rose"
        headline = f"Validation loss {verb} from {first:.3g} to {last:.3g}."
    scheme, degree = _get(run.summary, "sequence_parallel", "scheme"), _get(run.summary, "sequence_parallel", "degree")
    memory = _number(run.summary.get("peak_memory_bytes"))
    clips = run.summary.get("clips")
    processes = run.summary.get("world_size")
    figures = [
        _loss_figure("Validation loss", first, last),
        _loss_figure("Training loss", *_first_and_last(run.train)),
        _figure(
            "Throughput",
            _median(run.train, "frames_per_second"),
            "frames/s",
            f"{_median(run.train, 'tokens_per_second')} video tokens/s",
        ),
        _figure("Processes", processes, detail=f"{scheme}, degree {degree}" if degree and degree != 1 else ""),
        _figure("Peak memory", memory and _format_bytes(memory), detail="of one process"),
        _figure("Clips", _get(clips, "encoded"), detail=f"{_get(clips, 'quarantined')} quarantined"),
    ]
    return {
        "is_finished": finished,
        "status": status,
        "headline": headline,
        "figures": [figure for figure in figures if figure["value"]],
    }


def videos(run: RunFolder) -> dict[str, Any]:
    """The sampled videos by prompt, each beside the clip that the prompt was written for, and over training."""
    by_key: dict[str, dict[int, SampledVideo]] = {}
    for step, rows in run.samples.items():
        for row in rows:
            by_key.setdefault(row.key, {})[step] = row
    budget = EMBEDDED_BYTES
    prompts = []
    # Prompts that were followed over training come first.
    for over_steps in sorted(by_key.values(), key=len, reverse=True):
        newest = over_steps[max(over_steps)]
        shown = [
            (f"step {step}", step_folder(run.path, step) / over_steps[step].file) for step in _spread(list(over_steps))
        ]
        if newest.reference is not None:
            shown.insert(0, (REFERENCE_LABEL, run.path / newest.reference))
        items = []
        for label, path in shown:
            content = _read_video(run.path, path, budget)
            budget -= len(content)
            items.append(Video(label, path.name, base64.b64encode(content).decode()))
        prompts.append({"text": newest.prompt, "source_name": newest.source_name, "videos": items})
    lead = f"{len(prompts)} prompts" if len(prompts) != 1 else "One prompt"
    if any(row.reference for rows in run.samples.values() for row in rows):
        lead += ", each beside the clip it describes (as the VAE gives it back)"
    return {"prompts": prompts, "samples_lead": f"{lead}."}


def curves(run: RunFolder) -> dict[str, Any]:
    """Charts over the steps: losses, learning rate, gradient norm, throughput."""
    train, validation = _points(run.train, "loss"), _points(run.validation, "loss")
    lines = [
        Series("training", train, "var(--c1)", faint=True),
        Series("training, smoothed", smooth(train), "var(--c1)"),
        Series("validation", validation, "var(--c2)", dots=True),
    ]
    levels = sorted(
        {level for record in run.validation for level in _get(record, "loss_by_noise_level") or {}}, key=_sort_key
    )
    level_lines = [
        Series(
            level,
            [(record["step"], _number(_get(record, "loss_by_noise_level", level))) for record in run.validation],
            f"color-mix(in oklab, var(--c4) {100 * i // max(1, len(levels) - 1)}%, var(--c3))",
            dots=True,
        )
        for i, level in enumerate(levels)
    ]
    loss_charts = [
        line_chart("Loss", [line for line in lines if line.points], note="over optimizer steps"),
        line_chart("Validation loss by noise level", level_lines, note="fraction of the schedule"),
    ]
    training_charts = [
        line_chart(
            "Learning rate", [Series("learning rate", _points(run.train, "learning_rate"), "var(--c1)")], from_zero=True
        ),
        line_chart(
            "Gradient norm",
            [Series("gradient norm", _points(run.train, "grad_norm"), "var(--c4)")],
            note="before clipping",
        ),
        line_chart(
            "Throughput",
            [Series("tokens/s", _points(run.train, "tokens_per_second"), "var(--c3)")],
            from_zero=True,
            note="tokens per second",
        ),
    ]
    return {
        "loss_charts": [chart for chart in loss_charts if chart],
        "training_charts": [chart for chart in training_charts if chart],
        "has_training": bool(run.train),
        "has_validation": bool(run.validation),
        "skipped_steps": sum(record.get("skipped") is True for record in run.train),
        "recorded_steps": len(run.train),
    }


def step_time(run: RunFolder) -> dict[str, Any]:
    """Where a step's time goes: medians by phase, and the course over training."""
    timed = [record for record in run.train if isinstance(record.get("step_seconds"), dict)]
    seconds = {phase: [_number(record["step_seconds"].get(phase)) or 0.0 for record in timed] for phase in PHASES}
    medians = {phase: statistics.median(values) for phase, values in seconds.items() if values}
    total = sum(medians.values())
    if not total:
        return {"phases": [], "median_step": "", "time_chart": None}
    phases = [
        {
            "label": phase,
            "color": PHASE_COLORS[phase],
            "seconds": f"{value:.4f}",
            "share": f"{value / total:.1%}",
            "fraction": value / total,
        }
        for phase, value in medians.items()
    ]
    chart = stacked_chart("Seconds per step", [record["step"] for record in timed], seconds, PHASE_COLORS)
    return {"phases": phases, "median_step": f"{total:.3g} s", "time_chart": chart}


def data(run: RunFolder) -> dict[str, Any]:
    """What was trained on, by bucket, and what was left out."""
    samples: Counter[str] = Counter()
    for record in run.train:
        if isinstance(record.get("bucket"), str):
            samples[record["bucket"]] += int(_number(record.get("samples")) or 0)
    most = max(samples.values(), default=0) or 1
    buckets = [
        {
            "label": bucket,
            "share": count / most,
            "cells": [f"{count:,}", f"{count / (samples.total() or 1):.1%}"],
        }
        for bucket, count in samples.most_common()
    ]
    rows = [{key: str(row.get(key, "")) for key in ("name", "reason", "stage")} for row in run.quarantine]
    return {"buckets": buckets, "quarantine": rows[:TABLE_ROWS], "quarantine_more": max(0, len(rows) - TABLE_ROWS)}


def communication(run: RunFolder) -> list[dict[str, str]]:
    """Means per step of what each purpose cost in exchanges between ranks."""
    recorded = [record["communication"] for record in run.train if isinstance(record.get("communication"), dict)]
    rows = []
    for purpose in dict.fromkeys(purpose for traffic in recorded for purpose in traffic):
        calls, sent, seconds = (
            sum(_number(_get(traffic, purpose, key)) or 0.0 for traffic in recorded)
            for key in ("calls", "bytes", "seconds")
        )
        if calls:
            rows.append(
                {
                    "purpose": purpose,
                    "calls": format_number(calls / len(recorded)),
                    "bytes": _format_bytes(sent / len(recorded)),
                    "seconds": f"{seconds / len(recorded):.4f}",
                    "total": _format_bytes(sent),
                }
            )
    return rows


def storage(run: RunFolder) -> list[dict[str, str]]:
    """What reading the encoded data came to, by the summary; nothing before the run has ended."""
    counts = run.summary.get("storage")
    if not isinstance(counts, dict):
        return []
    rows = {key.removesuffix("_bytes"): _number(value) for key, value in counts.items() if key.endswith("_bytes")}
    shown = [{"label": f"read from {tier}", "value": _format_bytes(value)} for tier, value in rows.items() if value]
    hit_rate, wait = _number(counts.get("hit_rate")), _number(counts.get("wait_seconds"))
    if hit_rate is not None:
        shown.append({"label": "hit rate", "value": f"{hit_rate:.1%}"})
    if wait is not None:
        shown.append({"label": "waited for data", "value": f"{wait:.2f} s"})
    for key in ("retries", "fallbacks", "abandoned"):
        shown.append({"label": key, "value": format_number(_number(counts.get(key)) or 0)})
    errors = counts.get("errors")
    for kind, count in errors.items() if isinstance(errors, dict) else ():
        shown.append({"label": f"errors: {kind}", "value": format_number(_number(count) or 0)})
    return shown


def _read_video(run_dir: Path, path: Path, budget: int) -> bytes:
    """The bytes of a video inside the run folder; none if it is elsewhere, absent or larger than `budget`."""
    resolved = path.resolve()
    if not resolved.is_relative_to(run_dir.resolve()) or not resolved.is_file() or resolved.stat().st_size > budget:
        return b""
    return resolved.read_bytes()


def _spread(steps: Sequence[int]) -> list[int]:
    """At most `VIDEOS_PER_PROMPT` of the ascending steps, the first and the last among them."""
    if len(steps) <= VIDEOS_PER_PROMPT:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (VIDEOS_PER_PROMPT - 1))] for i in range(VIDEOS_PER_PROMPT)]


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def _points(records: Sequence[Record], key: str) -> list[Point]:
    return [(record["step"], _number(record.get(key))) for record in records]


def _first_and_last(records: Sequence[Record]) -> tuple[float | None, float | None]:
    values = [y for _, y in _points(records, "loss") if y is not None]
    return (values[0], values[-1]) if values else (None, None)


def _median(records: Sequence[Record], key: str) -> str:
    values = [y for _, y in _points(records, key) if y is not None]
    return format_number(round(statistics.median(values), 1)) if values else ""


def _figure(label: str, value: object, unit: str = "", detail: str = "") -> dict[str, str]:
    return {"label": label, "value": "" if value is None else str(value), "unit": unit, "detail": detail}


def _loss_figure(label: str, first: float | None, last: float | None) -> dict[str, str]:
    if first is None or last is None:
        return _figure(label, None)
    return _figure(label, f"{last:.3g}", detail=f"from {first:.3g} ({(last - first) / first:+.0%})" if first else "")


def _format_bytes(count: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def _sort_key(level: str) -> tuple[float, str]:
    try:
        return float(level), level
    except ValueError:
        return float("inf"), level
