"""Every `ttv-train` command line in the documentation is one that the program takes."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ttv_train.cli import build_parser, split_overrides
from ttv_train.config_file import apply_overrides, parse_config

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "data" / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PROGRAM = ("ttv-train", "ttv_train")


def _command_lines(page: Path) -> Iterator[str]:
    """Lines of fenced blocks that name no language or a shell."""
    language = None
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line.removeprefix("```").strip() if language is None else None
        elif language in ("", "bash", "sh") and any(name in line for name in PROGRAM):
            yield line


def _arguments(line: str) -> list[str]:
    """What follows the program's name, which may stand in quotes of another command."""
    words: list[str] = []
    for word in shlex.split(line, comments=True):
        words += word.split() if word.startswith("ttv-train ") else [word]
    return next((words[i + 1 :] for i, word in enumerate(words) if word in PROGRAM), [])


def _documented() -> list[tuple[str, str]]:
    found = [(page, _arguments(line)) for page in PAGES for line in _command_lines(page)]
    return [(str(page.relative_to(REPOSITORY)), shlex.join(arguments)) for page, arguments in found if arguments]


@pytest.mark.parametrize(("page", "command"), _documented())
def test_the_program_takes_a_documented_command(page, command):
    rest, overrides = split_overrides(shlex.split(command))
    build_parser().parse_args(rest)
    # A VAE's kind is the config's to say.
    data: dict = {"vae": {"kind": "diffusers", "path": "vae"}}
    apply_overrides(data, overrides)
    parse_config(data, yaml.safe_dump(data))


def test_the_readme_shows_every_command():
    shown = {command.split()[0] for page, command in _documented() if page == "README.md"}
    (commands,) = (action.choices for action in build_parser()._actions if action.dest == "command")
    assert shown == set(commands)
