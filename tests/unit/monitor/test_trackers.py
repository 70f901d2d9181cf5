import logging

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ttv_train.config import RunConfig, TrackingConfig
from ttv_train.errors import UserError
from ttv_train.monitor import trackers
from ttv_train.monitor.metrics import MetricsLog, read_metrics
from ttv_train.monitor.trackers import require_trackers

TENSORBOARD = RunConfig(tracking=TrackingConfig(trackers=["tensorboard"]))


def scalars(folder, tag):
    accumulator = EventAccumulator(str(folder / "trackers" / folder.name))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def log_losses(folder, losses, resumed_step=0):
    log = MetricsLog(folder, TENSORBOARD, is_main=True, resumed_step=resumed_step)
    for step, loss in losses.items():
        log.log(step, "train", {"loss": loss, "bucket": "8x96x160", "step_seconds": {"forward": 0.5}})
    log.close()


def test_tensorboard_gets_numbers_under_their_kind(tmp_path):
    log_losses(tmp_path, {1: 0.5, 2: float("nan"), 3: 0.25})
    assert scalars(tmp_path, "train/loss") == [(1, 0.5), (3, 0.25)]
    assert scalars(tmp_path, "train/step_seconds/forward") == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_tensorboard_hides_what_came_after_the_checkpoint(tmp_path):
    log_losses(tmp_path, {1: 0.5, 2: 0.25, 3: 0.125})
    log_losses(tmp_path, {2: 0.75}, resumed_step=1)
    assert scalars(tmp_path, "train/loss") == [(1, 0.5), (2, 0.75)]


def test_a_missing_package_is_named_with_its_mend(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UserError, match=r"tracking\.trackers names wandb.*pip install 'ttv-train\[wandb\]'"):
        require_trackers(["tensorboard", "wandb"])
    with pytest.raises(UserError, match=r"tracking\.trackers names clearml.*pip install clearml"):
        require_trackers(["clearml"])


def test_every_rank_refuses_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: [])
    with pytest.raises(UserError, match="tensorboard"):
        MetricsLog(tmp_path, TENSORBOARD, is_main=False, resumed_step=0)


def test_a_tracker_that_does_not_start_is_named(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("no API key\nlog in first")

    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["tensorboard"], "start", fail)
    with pytest.raises(UserError, match=r"tensorboard does not start: no API key log in first"):
        MetricsLog(tmp_path, TENSORBOARD, is_main=True, resumed_step=0)


def test_a_tracker_that_fails_later_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def fail(self, values, step):
        raise ConnectionError("service is down")

    monkeypatch.setattr(LOGGER_TYPE_TO_CLASS["tensorboard"], "log", fail)
    with caplog.at_level(logging.WARNING):
        log_losses(tmp_path, {1: 0.5, 2: 0.25})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()] == [
        "tracker tensorboard failed and is switched off: service is down"
    ]
