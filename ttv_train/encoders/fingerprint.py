"""Digests that tell whether something stored still is what the present settings would make."""

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(value: Any) -> str:
    """SHA-256, in hex, of JSON data; the order of object keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
