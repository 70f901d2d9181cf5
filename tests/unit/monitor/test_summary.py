import json

from ttv_train.config import RunConfig
from ttv_train.monitor.summary import describe, write_summary


def write_records(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def train_record(step, loss, rate, forward):
    return {
        "step": step,
        "kind": "train",
        "loss": loss,
        "frames_per_second": rate,
        "tokens_per_second": 10 * rate,
        "step_seconds": {"forward": forward},
    }


def test_a_summary_spans_the_records(tmp_path):
    write_records(
        tmp_path,
        [
            {"step": 0, "kind": "validation", "loss": 2.0},
            train_record(1, 1.9, 1.0, 9.0),
            train_record(2, 1.0, 8.0, 2.0),
            train_record(3, 0.5, 10.0, 1.0),
            {"step": 3, "kind": "validation", "loss": 0.75},
        ],
    )
    clips = {"encoded": 4, "quarantined": 1}
    storage = {"alluxio_bytes": 5, "hit_rate": None}
    summary = write_summary(tmp_path, RunConfig(), world_size=2, peak_memory_bytes=7, clips=clips, storage=storage)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "world_size": 2,
        "sequence_parallel": {"scheme": "none", "degree": 1},
        "steps": 3,
        "train_loss": {"first": 1.9, "last": 0.5},
        "validation_loss": {"first": 2.0, "last": 0.75},
        "frames_per_second": 8.0,
        "tokens_per_second": 80.0,
        "step_seconds": {"forward": 2.0},
        "peak_memory_bytes": 7,
        "clips": clips,
        "storage": storage,
    }
    assert describe(summary) == (
        "3 steps on 2 process(es): training loss 1.9000 -> 0.5000, validation loss 2.0000 -> 0.7500, 8.0 frames/s"
    )


def test_a_run_without_records_or_with_a_loss_that_was_not_finite_is_summarized(tmp_path):
    for records in ([], [train_record(1, None, 1.0, 1.0)]):
        write_records(tmp_path, records)
        summary = write_summary(tmp_path, RunConfig(), world_size=1, peak_memory_bytes=0, clips={}, storage={})
        assert summary["train_loss"] == {"first": None, "last": None}
        assert "training loss none -> none" in describe(summary)
