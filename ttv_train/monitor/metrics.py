"""metrics.jsonl: the record of a run, one JSON object per line.

Every record has `step`, the number of optimizer steps done, and `kind`:

    train       loss, grad_norm, learning_rate, skipped, epoch, bucket ("49x480x720"), samples, frames, tokens,
                frames_per_second, tokens_per_second, step_seconds {phase: seconds},
                communication {purpose: {calls, bytes, seconds}},
                storage {bytes by tier, errors by kind, and the other counters of `storage.counters`}
    validation  loss, loss_by_noise_level {fraction of the schedule: loss}

Numbers that are not finite are `null`. Records are in the order of their steps; after a crash and a resume they read as
if the run had never stopped.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from accelerate.tracking import GeneralTracker

from ttv_train.config import RunConfig
from ttv_train.monitor.trackers import require_trackers, start_trackers
from ttv_train.parallel.agreement import on_main_rank
from ttv_train.storage.partial import partial_file

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Writes metrics.jsonl and feeds the trackers, on the main rank; on the other ranks every call does nothing.

    Args:
        folder: the run folder.
        config: the run's config; `tracking.trackers` is used and all of it is shown to the trackers.
        is_main: whether this rank writes.
        resumed_step: steps done before. Records of later steps, which a crash has left behind, are removed, and so is
            a line that was cut off; 0 starts an empty file.

    Raises:
        UserError: on every rank, if a tracker is not installed or does not start.
    """

    def __init__(self, folder: Path, config: RunConfig, *, is_main: bool, resumed_step: int) -> None:
        require_trackers(config.tracking.trackers)
        self._file: IO[str] | None = None
        self._trackers: list[GeneralTracker] = []
        on_main_rank(lambda: self._open(folder, config, resumed_step) if is_main else None)

    def _open(self, folder: Path, config: RunConfig, resumed_step: int) -> None:
        path = folder / FILE_NAME
        _remove_later_records(path, resumed_step)
        self._file = path.open("a", encoding="utf-8", newline="\n")
        if config.tracking.trackers:
            self._trackers = start_trackers(
                config.tracking.trackers,
                folder / "trackers",
                run_name=folder.resolve().name,
                hyperparameters=_flat_scalars(config.model_dump(mode="json"), separator="."),
                resumed_step=resumed_step,
            )

    def log(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Appends one record. The line has left this process when the call returns, so that a kill does not lose it."""
        if self._file is None:
            return
        record = _null_for_non_finite({"step": step, "kind": kind, **values})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {
            f"{kind}/{key}": value
            for key, value in _flat_scalars(values, separator="/").items()
            if isinstance(value, int | float)
        }
        for tracker in list(self._trackers):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:
                # A service that is down must not stop a training run.
                logger.warning("tracker %s failed and is switched off: %s", tracker.name, error)
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Closes the file and the trackers."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder, in file order; none if there is no file. Lines that are not records are left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    return list(_records(path))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            yield record


def _remove_later_records(path: Path, last_step: int) -> None:
    kept = [record for record in _records(path) if record["step"] <= last_step] if path.exists() and last_step else []
    with partial_file(path) as partial:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _null_for_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _null_for_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_non_finite(item) for item in value]
    return value


def _flat_scalars(values: Mapping[str, Any], separator: str) -> dict[str, int | float | str]:
    """Numbers and strings of nested mappings by joined keys; lists as text; what is null or not finite is left out."""
    flat: dict[str, int | float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            nested = _flat_scalars(value, separator)
            flat.update({f"{key}{separator}{inner}": item for inner, item in nested.items()})
        elif isinstance(value, list | tuple):
            flat[key] = ", ".join(map(str, value))
        elif isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
            flat[key] = value
    return flat
