"""Videos that are no longer what was encoded."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ttv_train.data.changed_sources import changed_sources


@pytest.fixture
def scanned(tmp_path):
    """A manifest of two videos as they are, and what they were encoded from."""
    rows = []
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"frames")
        status = (tmp_path / name).stat()
        rows.append(
            {"name": name, "place": "", "size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": f"of {name}"}
        )
    manifest = tmp_path / "dataset.parquet"
    pq.write_table(pa.Table.from_pylist(rows), manifest)
    return manifest, tmp_path, {row["name"]: row["sha256"] for row in rows}


def test_what_was_not_touched_has_not_changed(scanned):
    assert changed_sources(*scanned) == set()


def test_a_file_that_was_touched_has_changed_and_one_that_is_gone_has_not(scanned):
    manifest, folder, encoded = scanned
    (folder / "a.mp4").write_bytes(b"other frames")
    (folder / "b.mp4").unlink()
    assert changed_sources(manifest, folder, encoded) == {"a.mp4"}


def test_a_scan_that_was_not_followed_by_a_commit_does_not_hide_a_change(scanned):
    manifest, folder, encoded = scanned
    assert changed_sources(manifest, folder, encoded | {"b.mp4": "of its earlier content"}) == {"b.mp4"}


def test_videos_that_were_never_encoded_do_not_matter(scanned):
    manifest, folder, encoded = scanned
    (folder / "a.mp4").write_bytes(b"other frames")
    assert changed_sources(manifest, folder, {"b.mp4": encoded["b.mp4"]}) == set()
