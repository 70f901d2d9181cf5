"""Everything that a run leaves in its folder, read leniently: a report is also wanted of a run that went wrong."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ttv_train.data.quarantine import read_quarantine
from ttv_train.errors import UserError
from ttv_train.monitor.metrics import read_metrics
from ttv_train.monitor.samples import SampledVideo, read_samples

Record = Mapping[str, Any]


@dataclass
class RunFolder:
    """What a run folder holds."""

    path: Path
    train: list[Record]
    validation: list[Record]
    samples: dict[int, list[SampledVideo]]
    summary: dict[str, Any]
    environment: dict[str, Any]
    quarantine: list[Record]
    config_text: str
    config: dict[str, Any]
    notes: list[str]
    """What could not be read, for the reader of the report."""


def read_run(run_dir: Path) -> RunFolder:
    """Reads a run folder, leaving out what is absent or damaged.

    Raises:
        UserError: the folder does not exist, or is not a run's.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a folder; give the output_dir of a run")
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "config.resolved.yaml", "samples")):
        raise UserError(
            f"{run_dir} has no metrics.jsonl, config.resolved.yaml or samples; give the output_dir of a run"
        )
    notes: list[str] = []
    metrics = read_metrics(run_dir)
    config_text = _read_text(run_dir / "config.resolved.yaml")
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None
        notes.append("config.resolved.yaml is not valid YAML.")
    return RunFolder(
        path=run_dir,
        train=[record for record in metrics if record["kind"] == "train"],
        validation=[record for record in metrics if record["kind"] == "validation"],
        samples=read_samples(run_dir),
        summary=_read_object(run_dir / "summary.json", notes),
        environment=_read_object(run_dir / "environment.json", notes),
        quarantine=[asdict(row) for row in read_quarantine(run_dir / "quarantine.jsonl")],
        config_text=config_text,
        config=config if isinstance(config, dict) else {},
        notes=notes,
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(path)
    if not text:
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content
    notes.append(f"{path.name} is damaged and left out.")
    return {}
