from pathlib import Path

import pytest

from tests.unit.storage.doors import CONTENT, part
from ttv_train.config import StorageConfig
from ttv_train.errors import UserError
from ttv_train.storage import opening
from ttv_train.storage.counters import counters
from ttv_train.storage.failures import scrub
from ttv_train.storage.mounts import is_alluxio_mount
from ttv_train.storage.opening import open_store, under_store_url
from ttv_train.storage.watchdog import WatchedDoor

MOUNTS = """\
proc /proc proc rw 0 0
alluxio-fuse /mnt/alluxio fuse.alluxio-fuse rw,nosuid 0 0
alluxio-fuse /mnt/with\\040space fuse.alluxio-fuse rw 0 0
/dev/alluxio-disk /data ext4 rw 0 0
tmpfs /mnt/alluxio/inner tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/mnt/alluxio", True),
        ("/mnt/alluxio/set/latents", True),
        ("/mnt/with space/set", True),
        ("/mnt/alluxio/../plain", False),
        ("/mnt/alluxio-not", False),
        ("/mnt/alluxio/inner/set", False),
        ("/data", False),
    ],
)
def test_mounts_of_alluxio_are_recognised(tmp_path, folder, expected):
    table = tmp_path / "mounts"
    table.write_text(MOUNTS)
    assert is_alluxio_mount(Path(folder), table) is expected


def test_a_mount_of_alluxio_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "is_alluxio_mount", lambda folder: True)
    door = opening.open_door(str(tmp_path), StorageConfig())
    assert isinstance(door, WatchedDoor)
    assert door.tier == "alluxio"


def test_what_the_mount_cannot_give_comes_from_the_under_store(tmp_path, monkeypatch, caplog):
    mount, under_store = tmp_path / "mount", tmp_path / "under"
    monkeypatch.setattr(opening, "is_alluxio_mount", lambda folder: folder.is_relative_to(mount))
    config = StorageConfig(under_stores={str(mount): str(under_store)}, fallback_after_seconds=0)
    for folder, content in ((mount, CONTENT[:100]), (under_store, CONTENT)):
        (folder / "set").mkdir(parents=True)
        (folder / "set/a").write_bytes(content)
    (under_store / "set/b").write_bytes(CONTENT)
    store = open_store(str(mount / "set"), config)
    before = counters.snapshot()
    assert store.read_many([part(0, 50), part(90, 20), part(0, 20, "b")]) == [
        CONTENT[:50],
        CONTENT[90:110],
        CONTENT[:20],
    ]
    after = counters.snapshot()
    assert after["fallbacks"] - before["fallbacks"] == 2
    assert after["errors"]["short"] > before["errors"].get("short", 0)
    assert after["bytes"]["under_store"] - before["bytes"].get("under_store", 0) == 40
    assert store.size("b") == len(CONTENT)
    assert f"instead of {mount}" in caplog.text


def test_under_stores_go_by_whole_path_parts():
    config = StorageConfig(under_stores={"/mnt/alluxio": "s3://bucket/", "alluxio://w:28080": "file:///d"})
    assert under_store_url("/mnt/alluxio/a/b", config) == "s3://bucket/a/b"
    assert under_store_url("/mnt/alluxio-2/a", config) is None
    assert under_store_url("alluxio://w:28080/set", config) == "file:///d/set"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://AKIA:secret@bucket/latents", "holds credentials"),
        ("https://host/latents?sig=secret", "holds credentials"),
        ("https://host/latents", "not among storage.http_hosts"),
        ("alluxio://worker/latents", "under_stores"),
        ("alluxio+s3://host/bucket", "PORT"),
    ],
)
def test_urls_that_cannot_be_opened(url, problem):
    with pytest.raises(UserError, match=problem) as error:
        open_store(url)
    assert "secret" not in str(error.value)


def test_errors_are_scrubbed_of_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-a-secret")
    assert scrub("denied for\ncanary-of-a-secret") == "denied for ***"
