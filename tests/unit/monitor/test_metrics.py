import json

import pytest

from ttv_train.config import RunConfig, TrackingConfig
from ttv_train.monitor.metrics import MetricsLog, read_metrics

NO_TRACKERS = RunConfig(tracking=TrackingConfig(trackers=[]))


def write(folder, steps, resumed_step=0, config=NO_TRACKERS):
    log = MetricsLog(folder, config, is_main=True, resumed_step=resumed_step)
    for step in steps:
        log.log(step, "train", {"loss": 1 / (1 + step)})
    log.close()


def steps(folder):
    return [record["step"] for record in read_metrics(folder)]


def test_every_record_is_on_disk_when_log_returns(tmp_path):
    log = MetricsLog(tmp_path, NO_TRACKERS, is_main=True, resumed_step=0)
    log.log(3, "validation", {"loss": 0.5, "loss_by_noise_level": {"0.1": 0.25}})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {
        "step": 3,
        "kind": "validation",
        "loss": 0.5,
        "loss_by_noise_level": {"0.1": 0.25},
    }
    assert line.endswith("\n")
    log.close()


def test_non_finite_numbers_are_null(tmp_path):
    log = MetricsLog(tmp_path, NO_TRACKERS, is_main=True, resumed_step=0)
    log.log(1, "train", {"loss": float("nan"), "step_seconds": {"forward": float("inf")}, "list": [float("-inf"), 1]})
    log.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "kind": "train", "loss": None, "step_seconds": {"forward": None}, "list": [None, 1]}
    ]


def test_resume_removes_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 7), resumed_step=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", ['{"step": 3, "ki', '{"step": 3', "{", '"text"', "\x00\x00\x00", "\udcff"])
def test_resume_removes_a_line_that_was_cut_off(tmp_path, torn):
    write(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn.encode(errors="surrogateescape"))
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, [3], resumed_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_run_from_scratch_starts_an_empty_file(tmp_path):
    write(tmp_path, [0, 1])
    write(tmp_path, [0])
    assert steps(tmp_path) == [0]


def test_resume_without_a_file_starts_one(tmp_path):
    write(tmp_path, [8], resumed_step=7)
    assert steps(tmp_path) == [8]


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(tmp_path, NO_TRACKERS, is_main=False, resumed_step=0)
    log.log(1, "train", {"loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_metrics_has_no_records(tmp_path):
    assert read_metrics(tmp_path) == []
