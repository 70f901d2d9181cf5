"""The code in the how-to pages runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import REPOSITORY, environment

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
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("one process", "ulysses on 2 ranks", "ring on 2 ranks"):
        assert f"{name}: worst difference" in done.stdout
