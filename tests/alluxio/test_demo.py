"""`make demo-alluxio`, shorter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.alluxio.conftest import REPOSITORY, load_tool
from tests.e2e.conftest import environment

SHORT = ("--training.steps", "6", "--validation.every_steps", "6", "--checkpoint.every_steps", "6")


def test_the_demo_ends_with_what_alluxio_did(tmp_path):
    if (missing := load_tool().why_not()) is not None:
        pytest.skip(missing)
    run = tmp_path / "run"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ttv-train and accelerate of this Python
    command = ["tools/alluxio/demo.sh", run, *SHORT, "--sampling.num_steps", "2"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**environment(), "PATH": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    storage = json.loads((run / "summary.json").read_text())["storage"]
    assert storage["alluxio_bytes"] > 0
    assert 0 <= storage["hit_rate"] <= 1
    assert storage["wait_seconds"] > 0
    assert storage["fallbacks"] == 0
    assert f"storage: {storage}" in done.stdout
    report = (run / "report.html").read_text()
    assert all(shown in report for shown in ("read from alluxio", "hit rate", "waited for data"))
