from ttv_train.monitor import progress
from ttv_train.monitor.progress import TrainingProgress

RECORD = {"loss": 0.25, "frames_per_second": 12.34, "tokens_per_second": 45678.0}


def test_the_bar_shows_steps_loss_rates_and_eta(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    bar = TrainingProgress(10, 4, is_main=True)
    bar.update(RECORD)
    bar.update(RECORD)
    bar.close()
    last = capsys.readouterr().err.split("\r")[-1]
    assert "6/10" in last
    assert "loss 0.2500, 12.3 frames/s, 45,678 tokens/s" in last
    assert "<00:0" in last  # the time left


def test_other_ranks_print_nothing(capsys):
    bar = TrainingProgress(10, 0, is_main=False)
    bar.update(RECORD)
    bar.close()
    assert capsys.readouterr().err == ""
