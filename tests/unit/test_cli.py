import pytest

from ttv_train.cli import build_parser, main, split_overrides


@pytest.mark.parametrize(
    ("arguments", "rest", "overrides"),
    [
        (
            ["train", "--config", "a.yaml", "--optimizer.learning_rate", "5e-5", "--dry-run"],
            ["train", "--config", "a.yaml", "--dry-run"],
            ["--optimizer.learning_rate", "5e-5"],
        ),
        (["train", "--seed=3", "--config", "a.yaml"], ["train", "--config", "a.yaml"], ["--seed=3"]),
        (["check-data", "--dataset.fps", "8", "clips"], ["check-data", "clips"], ["--dataset.fps", "8"]),
        (["sample", "--checkpoint", "c", "--output_dir", "o"], ["sample", "--checkpoint", "c"], ["--output_dir", "o"]),
        (["train", "--ema.enabled", "--dry-run"], ["train", "--dry-run"], ["--ema.enabled"]),
        (["train", "--ema.decay", "-1"], ["train"], ["--ema.decay", "-1"]),
    ],
)
def test_overrides_are_told_from_options(arguments, rest, overrides):
    assert split_overrides(arguments) == (rest, overrides)


def test_help_shows_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    for command in ("encode", "train", "sample", "export", "check-data", "report"):
        assert command in shown


def test_an_unknown_option_is_refused():
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args(["train", "--config", "a.yaml", "--fast"])
    assert exit_.value.code == 2


def test_a_user_error_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "absent.yaml")]) == 2
    assert capsys.readouterr().err == f"ttv-train: error: --config {tmp_path}/absent.yaml: no such file\n"
