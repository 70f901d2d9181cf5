"""The commands of data/README.md on a dataset of every layout."""

import json
import re
import shlex

import pytest

from tests.dataset_folders import LAYOUTS
from tests.e2e.conftest import REPOSITORY
from ttv_train.cli import main

README = (REPOSITORY / "data/README.md").read_text(encoding="utf-8")


def readme_commands() -> list[list[str]]:
    """Arguments of every `ttv-train` command of the README."""
    commands = re.findall(r"^ttv-train (.*)$", README, re.MULTILINE)
    return [shlex.split(command, comments=True) for command in commands]


@pytest.mark.parametrize("layout", ["FastVideo JSON", "webdataset", "Parquet"])
def test_check_data_reads_videos_beside_in_and_behind_caption_files(tmp_path, capsys, layout):
    LAYOUTS[layout](tmp_path / "set")
    arguments = next(command for command in readme_commands() if "--dataset.buckets" in command)
    arguments = [str(tmp_path / "set") if argument == "FOLDER" else argument for argument in arguments]
    arguments[arguments.index("--dataset.buckets") + 1] = "[8x90x160]"
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clips"], report["dropped"]) == (2, 0)


def test_every_command_of_the_readme_runs(tmp_path, capsys):
    LAYOUTS["text files"](tmp_path / "set")
    (tmp_path / "run.yaml").write_text("dataset: {fps: 8, buckets: [8x96x160]}\n")
    paths = {"FOLDER": "set", "run.yaml": "run.yaml", "manifest.parquet": "m.parquet", "page.html": "page.html"}
    replaced = {"[49x480x720, 49x720x480]": "[8x96x160]"} | {name: str(tmp_path / path) for name, path in paths.items()}
    commands = readme_commands()
    assert len(commands) >= 2
    for command in commands:
        arguments = [replaced.get(argument, argument) for argument in command]
        assert main(arguments) == 0, command
        capsys.readouterr()
    assert (tmp_path / "m.parquet").exists()
    assert "2 videos" in (tmp_path / "page.html").read_text()
