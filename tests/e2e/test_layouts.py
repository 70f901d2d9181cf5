"""The loss curve is a property of the config, not of the layout that computes it."""

import pytest

from tests.e2e.conftest import launch, losses

STEPS = 20


@pytest.fixture(scope="module")
def one_process(encoded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts") / "one"
    launch(1, "train", "--config", str(encoded), "--output_dir", str(folder), "--training.steps", str(STEPS))
    return losses(folder)


@pytest.mark.parametrize(
    ("processes", "scheme", "degree", "extra"),
    [
        (2, "ulysses", 2, []),
        (2, "none", 1, ["--training.micro_batch_size", "1"]),
        (4, "ulysses", 2, ["--parallel.activation_checkpointing", "true", "--parallel.reshard_after_forward", "false"]),
        (2, "ring", 2, []),
        (4, "usp", 4, ["--parallel.sequence.ulysses_degree", "2"]),
    ],
    ids=["ulysses-2", "data-2", "data-2-ulysses-2", "ring-2", "usp-2x2"],
)
def test_every_layout_has_the_same_loss_at_every_step(
    one_process, encoded, run_folder, processes, scheme, degree, extra
):
    launch(
        processes,
        "train",
        *("--config", str(encoded), "--output_dir", str(run_folder), "--training.steps", str(STEPS)),
        *("--parallel.sequence.scheme", scheme, "--parallel.sequence.degree", str(degree)),
        *extra,
    )
    curve = losses(run_folder)
    assert list(curve) == list(one_process) == list(range(1, STEPS + 1))
    for step, loss in curve.items():
        assert loss == pytest.approx(one_process[step], rel=1e-5), f"step {step}"
