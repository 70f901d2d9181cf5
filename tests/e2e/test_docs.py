"""The code in the how-to pages runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import REPOSITORY, environment
from ttv_train.config_file import parse_config
from ttv_train.diffusion import build_objective
from ttv_train.encoders.text.recipes import RECIPES
from ttv_train.models import FAMILIES

FILE = re.compile(r"^`(?P<name>\w+\.py)`:\n\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def save_files(page: str, folder: Path) -> list[str]:
    """Writes the files that a page names above their code to `folder`; returns their names."""
    text = (REPOSITORY / "docs" / page).read_text()
    files = {match["name"]: match["code"] for match in FILE.finditer(text)}
    assert len(files) == text.count("```python"), "every block of code names its file"
    for name, code in files.items():
        (folder / name).write_text(code)
    return list(files)


def test_the_family_that_is_added_is_the_same_on_two_ranks(tmp_path):
    assert save_files("how-to/add-a-model-family.md", tmp_path) == ["mochi.py", "check_mochi.py"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "check_mochi.py",
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for name in ("one process", "ulysses on 2 ranks", "ring on 2 ranks"):
        assert f"{name}: worst difference" in done.stdout


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs/how-to").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_config_in_the_documentation_is_one(page):
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        config = parse_config(yaml.safe_load(block))
        build_objective(config.objective, FAMILIES[config.model.family])


def test_the_table_of_recipes_is_that_of_the_code():
    table = (REPOSITORY / "docs/how-to/fine-tune-a-published-model.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d+) \| ([^|]+) \|", table, re.MULTILINE)
    beyond = {"kept": "embeddings of the padding", "zeroed": "zeros", "masked": "masked"}
    assert {name: (int(tokens), padding) for name, _, tokens, padding in rows} == {
        name: (recipe.max_length, beyond[recipe.padding]) for name, recipe in RECIPES.items()
    }
    assert all(RECIPES[name].architecture.startswith(encoder) for name, encoder, *_ in rows)
