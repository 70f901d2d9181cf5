"""One real Alluxio for all of these tests, and a folder of its own for every test, through the mount and the S3 API."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
CACHE_MIB = 24


def load_tool() -> ModuleType:
    """tools/alluxio/cluster.py, which is a program and no part of the package."""
    spec = importlib.util.spec_from_file_location("alluxio_cluster", REPOSITORY / "tools/alluxio/cluster.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="package")
def cluster(tmp_path_factory) -> Iterator[object]:
    """A running cluster; skipped, with what to do about it, where it cannot run."""
    tool = load_tool()
    if (missing := tool.why_not()) is not None:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("alluxio")
    running = tool.Cluster(folder, f"{CACHE_MIB}MB", fuse=tool.why_not(fuse=True) is None, dies_with_parent=True)
    running.start()
    yield running
    running.stop()


@dataclass
class Folder:
    """A folder of the cluster: where it lies in the under-store, and its URL through the door under test."""

    door: str
    ufs: Path
    url: str


@pytest.fixture(params=["fuse", "s3"])
def folder(cluster, request, tmp_path) -> Folder:
    """A fresh, empty one. Its name was never seen, so Alluxio knows nothing stale of it."""
    if request.param == "fuse" and not cluster.fuse:
        pytest.skip(str(load_tool().why_not(fuse=True)))
    name = f"{request.param}-{tmp_path.parent.name}-{tmp_path.name}".lower().replace("_", "-")
    ufs = cluster.ufs / name
    ufs.mkdir()
    return Folder(request.param, ufs, f"{cluster.mount}/{name}" if request.param == "fuse" else f"{cluster.s3}/{name}")


@pytest.fixture
def respawn(cluster) -> Iterator[Callable[[str], None]]:
    """Starts servers that a test has killed; at its end, those that it has left dead."""
    yield cluster.respawn
    for name in ("master", "worker"):
        if not cluster.is_alive(name):
            cluster.respawn(name)
