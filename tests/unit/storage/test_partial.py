"""Files that are there whole or not at all."""

import pytest

from ttv_train.storage.partial import partial_file, write_text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_text(tmp_path / "new" / "page.html", "caf\udce9")
    with pytest.raises(OSError, match="full"), partial_file(path) as partial:
        partial.write_text("half")
        raise OSError("full")
    assert path.read_text(encoding="utf-8") == "caf\\udce9"
    assert list(path.parent.iterdir()) == [path]
