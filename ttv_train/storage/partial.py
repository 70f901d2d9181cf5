"""Files that appear under their names only when they are complete: a rename is atomic, a write is not."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

PARTIAL_PREFIX = ".partial-"


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A new name beside `path`, whose folder is made. The body writes the file and gives it its name with
    `partial.replace(path)`; what still has the other name at the end is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL_PREFIX}{path.name}-{secrets.token_hex(8)}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Writes UTF-8 and returns `path`. Bytes of file names that are not UTF-8 are shown as ``\\udcXX``."""
    with partial_file(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        return partial.replace(path)
