import math

import pytest
import torch

from ttv_train.verify.comparison import Comparison, Gradients, differences, format_table, verdict


def test_the_parameter_that_differs_most_is_named():
    reference = Gradients(2.0, {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])})
    found = Gradients(2.2, {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.2])})
    loss, gradient, parameter = differences(found, reference)
    assert (loss, gradient, parameter) == (pytest.approx(0.1), pytest.approx(0.2), "b")


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_on_the_scale_of_the_others():
    reference = Gradients(1.0, {"a": torch.tensor([1.0]), "key bias": torch.tensor([1e-17])})
    found = Gradients(1.0, {"a": torch.tensor([1.0]), "key bias": torch.tensor([-3e-17])})
    assert differences(found, reference)[1] < 1e-12


def test_a_missing_number_is_the_worst_difference():
    reference = Gradients(1.0, {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])})
    found = Gradients(1.0, {"a": torch.tensor([math.nan]), "b": torch.tensor([9.0])})
    _, gradient, parameter = differences(found, reference)
    assert parameter == "a"
    assert "the gradient of a differs" in verdict(0.0, gradient, parameter, [], "float64")


@pytest.mark.parametrize(
    ("loss", "gradient", "traffic", "expected"),
    [
        (1e-11, 1e-11, [(8.0, 8.0)], ""),
        (1e-9, 0.0, [(8.0, 8.0)], "the loss differs by more than 1e-10"),
        (math.nan, 0.0, [(8.0, 8.0)], "the loss differs by more than 1e-10"),
        (0.0, 1e-9, [(8.0, 8.0)], "the gradient of w differs by more than 1e-10"),
        (0.0, 0.0, [(8.0, 8.0), (9.0, 8.0)], "the bytes sent differ from the formula"),
    ],
)
def test_verdicts(loss, gradient, traffic, expected):
    assert verdict(loss, gradient, "w", traffic, "float64") == expected


def test_the_table_shows_the_worst_shape_of_each_scheme():
    def row(shape, **values):
        return Comparison("wan", "ring", 2, shape, 6, parameter="proj.weight", **values)

    rows = [
        row((4, 1, 2, 2), status="passed", gradient_difference=1e-15),
        row((4, 1, 2, 6), status="failed", gradient_difference=0.3, reason="the gradient of proj.weight differs"),
        Comparison("wan", "dsp", 2, (4, 1, 2, 2), 0, "impossible", "wan can be shared by ulysses"),
    ]
    header, ring, dsp = format_table(rows).splitlines()
    assert "gradient diff  bytes/block  formula  seconds" in header
    assert "1/2" in ring
    assert "3.0e-01" in ring
    assert ring.endswith("FAILED at latents 4x1x2x6: the gradient of proj.weight differs")
    assert dsp.endswith("impossible: wan can be shared by ulysses")
