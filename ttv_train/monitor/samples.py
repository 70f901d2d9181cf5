"""The sampled videos of a run folder: where they lie, and which prompt each belongs to.

samples/step-00000400/00-a-dog-lies-by-a-door.mp4      one video per prompt
samples/step-00000400/prompts.json                     a list of `SampledVideo` objects
references/<key>.mp4                                   the clip that a prompt was written for
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ttv_train.storage.partial import write_text

PROMPTS_FILE = "prompts.json"
LONGEST_SLUG = 48


@dataclass(frozen=True)
class SampledVideo:
    """One row of prompts.json."""

    file: str
    """Name of the video, in the folder of prompts.json."""
    prompt: str
    """The text it was sampled from."""
    key: str
    """Key of the initial noise: equal at every step, and the latent store's key where the prompt is a clip's."""
    source_name: str | None = None
    """File in the dataset folder whose caption the prompt is."""
    reference: str | None = None
    """That clip as the VAE gives it back, at the size and rate of the sample: a path relative to the run folder."""


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the videos sampled after `step` optimizer steps lie."""
    return run_folder / "samples" / f"step-{step:08d}"


def video_name(index: int, prompt: str) -> str:
    """A file name that says which prompt it is: only ``[a-z0-9-]``, whatever the prompt holds."""
    return f"{index:02d}-{slug(prompt)}.mp4"


def slug(text: str) -> str:
    """Letters and digits of `text` in ASCII, joined by hyphens; ``"prompt"`` if it has none."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text)[: LONGEST_SLUG + 1].strip("-")
    return words[:LONGEST_SLUG].strip("-") or "prompt"


def write_prompts(folder: Path, rows: Iterable[SampledVideo]) -> Path:
    """Writes prompts.json; rows of videos that an earlier call left in `folder` under other names stay."""
    merged = {row.file: row for row in [*read_prompts(folder), *rows]}
    content = [asdict(merged[file]) for file in sorted(merged)]
    return write_text(folder / PROMPTS_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_prompts(folder: Path) -> list[SampledVideo]:
    """The rows of a folder's prompts.json whose video is there; none if the file is absent or damaged."""
    try:
        content = json.loads((folder / PROMPTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    rows = [_row(item) for item in content] if isinstance(content, list) else []
    return [row for row in rows if row is not None and (folder / row.file).is_file()]


def read_samples(run_folder: Path) -> dict[int, list[SampledVideo]]:
    """The sampled videos of a run, by step, ascending."""
    samples = {}
    for folder in (run_folder / "samples").glob("step-*"):
        number = folder.name.removeprefix("step-")
        rows: Sequence[SampledVideo] = read_prompts(folder) if number.isdecimal() else ()
        if rows:
            samples[int(number)] = list(rows)
    return dict(sorted(samples.items()))


def _row(item: object) -> SampledVideo | None:
    """A row of prompts.json, or None for what is not one; a `file` is a plain name, never a path elsewhere."""
    if not isinstance(item, dict):
        return None
    values = {field.name: item.get(field.name) for field in fields(SampledVideo)}
    required = [values[name] for name in ("file", "prompt", "key")]
    optional = [values[name] for name in ("source_name", "reference")]
    if not all(isinstance(value, str) for value in required):
        return None
    if not all(value is None or isinstance(value, str) for value in optional):
        return None
    row = SampledVideo(**values)  # type: ignore[arg-type]
    return row if Path(row.file).name == row.file else None
