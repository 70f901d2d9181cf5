"""quarantine.jsonl: what a run left out, one row each, with the reason."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ttv_train.storage.partial import write_text

STAGES_OF_ENCODING = ("list", "probe", "decode", "encode")
"""Each job that lists a dataset finds anew what these leave out."""


@dataclass(frozen=True)
class QuarantineRow:
    """One file, caption row or clip that was left out."""

    name: str
    """The file, relative to the dataset folder; or FILE:LINE of a caption row that names none."""
    reason: str
    stage: str
    """Where it was found out: `list`, `probe`, `decode`, `encode` or `train`."""


class Quarantine:
    """Appends to a quarantine.jsonl, which holds a name and reason once however often they are reported.

    Ranks may add to one file at the same time; a row is one write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {(row.name, row.reason) for row in read_quarantine(path)}

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._known)

    def add(self, row: QuarantineRow) -> None:
        """Writes a row unless the file has one of this name and reason, also from another process."""
        if (row.name, row.reason) not in self._known:
            self._known |= {(other.name, other.reason) for other in read_quarantine(self._path)}
        if (row.name, row.reason) in self._known:
            return
        self._known.add((row.name, row.reason))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(b"\n" * self._ends_torn() + json.dumps(asdict(row)).encode() + b"\n")

    def replace(self, stages: Iterable[str], rows: Iterable[QuarantineRow]) -> None:
        """Makes `rows` the only ones of `stages`, so that what has been mended since the last time leaves the file."""
        replaced = set(stages)
        kept = [row for row in read_quarantine(self._path) if row.stage not in replaced]
        wanted = {(row.name, row.reason): row for row in [*kept, *rows]}
        write_text(self._path, "".join(json.dumps(asdict(row)) + "\n" for row in wanted.values()))
        self._known = set(wanted)

    def _ends_torn(self) -> bool:
        """Whether a killed process left its last row unfinished."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return False
        with self._path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"


def read_quarantine(path: Path) -> list[QuarantineRow]:
    """The rows of a file, without one that a killed process left unfinished; none if there is no file."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            rows.append(QuarantineRow(**json.loads(line.decode(errors="replace"))))
        except (ValueError, TypeError):
            continue
    return rows
