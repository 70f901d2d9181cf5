import json

from ttv_train.data.quarantine import Quarantine, QuarantineRow, read_quarantine

ROW = QuarantineRow("a.mp4", "zero bytes", "probe")
OTHER = QuarantineRow("a.mp4", "missing caption", "list")


def test_a_name_and_reason_are_written_once(tmp_path):
    path = tmp_path / "run/quarantine.jsonl"
    quarantine = Quarantine(path)
    assert len(quarantine) == 0
    for row in (ROW, OTHER, ROW):
        quarantine.add(row)
    reopened = Quarantine(path)
    reopened.add(QuarantineRow("a.mp4", "zero bytes", "decode"))
    assert len(quarantine) == len(reopened) == 2
    assert read_quarantine(path) == [ROW, OTHER]
    assert json.loads(path.read_text().splitlines()[0]) == {"name": "a.mp4", "reason": "zero bytes", "stage": "probe"}


def test_a_torn_row_is_passed_over(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    Quarantine(path).add(ROW)
    path.write_bytes(path.read_bytes() + b'{"name": "b.mp4", "rea')
    Quarantine(path).add(OTHER)
    assert read_quarantine(path) == [ROW, OTHER]


def test_rows_of_a_stage_are_replaced(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path)
    quarantine.add(ROW)
    quarantine.add(OTHER)
    new = QuarantineRow("b.mp4", "no video stream", "probe")
    quarantine.replace(["probe", "decode"], [new])
    assert read_quarantine(path) == [OTHER, new]
    quarantine.add(ROW)
    assert len(quarantine) == 3


def test_names_of_any_characters(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    row = QuarantineRow("new\nline \u2028 🎬 \udce9.mp4", "reason", "probe")
    Quarantine(path).add(row)
    assert read_quarantine(path) == [row]
