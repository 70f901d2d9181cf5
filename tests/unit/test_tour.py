"""The tour of CONTRIBUTING.md names only what exists."""

import importlib
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOTTED = sorted(set(re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_.]+)`", TEXT)))


def resolve(dotted: str) -> object:
    """The object that a dotted name below `ttv_train` stands for."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module("ttv_train." + ".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            target = getattr(target, name)
        return target
    raise AssertionError(dotted)


@pytest.mark.parametrize("dotted", [name for name in DOTTED if not name.endswith((".py", ".mp4", ".jsonl", ".sh"))])
def test_every_stop_exists(dotted):
    assert resolve(dotted) is not None


def test_the_tour_has_stops():
    assert len(DOTTED) > 25
