import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttv_train.report_charts import (
    Scale,
    Series,
    format_number,
    line_chart,
    linear_ticks,
    log_ticks,
    smooth,
    stacked_chart,
    thin_out,
)


class Parser(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.data = [], [], None
        self.feed(str(html))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if "data-chart" in dict(attributes):
            self.data = json.loads(dict(attributes)["data-chart"])

    def handle_data(self, text):
        self.text.append(text)

    def paths(self, name):
        return [attributes["d"] for tag, attributes in self.tags if attributes.get("class") == name]


def test_a_line_runs_from_corner_to_corner():
    chart = Parser(line_chart("Loss", [Series("a", [(10, 0.0), (20, 5.0), (30, 10.0)], "red")], from_zero=True))
    [path] = chart.paths("line")
    places = [tuple(map(float, place.split())) for place in re.findall(r"[ML]([\d. -]+)", path)]
    assert [x for x, _ in places] == [0, 50, 100]
    heights = [y for _, y in places]
    assert heights[0] == 100  # zero is at the bottom
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.02)
    assert 0 < heights[2] < 10
    assert chart.data["series"] == [{"label": "a", "color": "red", "points": [[10, 0.0], [20, 5.0], [30, 10.0]]}]


def test_a_missing_number_is_a_gap():
    chart = Parser(line_chart("Loss", [Series("a", [(0, 1.0), (1, 2.0), (2, None), (3, 1.0)], "red")]))
    assert re.sub(r"[\d. ]+", "", chart.paths("line")[0]) == "MLM"
    assert chart.data["series"][0]["points"][2] == [2, None]


def test_wide_ranges_of_positive_values_are_logarithmic():
    wide = [(0, 1.0), (1, 0.1), (2, 0.01)]
    chart = Parser(line_chart("Loss", [Series("a", wide, "red")]))
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", chart.paths("line")[0])]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.02)
    assert "logarithmic" in chart.text
    assert "logarithmic" not in Parser(line_chart("Loss", [Series("a", [*wide, (3, -1.0)], "red")])).text


def test_one_point_and_constant_lines_can_be_drawn():
    for points in ([(5, 0.0)], [(5, 3.0)], [(1, 2.0), (2, 2.0)], [(1, -2.0)]):
        assert "nan" not in str(line_chart("Loss", [Series("a", points, "red", dots=True)]))


def test_nothing_to_draw_is_no_chart():
    assert line_chart("Loss", []) is None
    assert line_chart("Loss", [Series("a", [(1, None)], "red")]) is None
    assert stacked_chart("Time", [], {"a": []}, {"a": "red"}) is None
    assert stacked_chart("Time", [1], {"a": [0.0]}, {"a": "red"}) is None


def test_labels_are_escaped():
    hostile = "\"><script>alert('1')</script>"
    for chart in (
        line_chart(hostile, [Series(hostile, [(0, 1.0)], "red"), Series("b", [(0, 1.0)], "red")], note=hostile),
        stacked_chart(hostile, [1], {hostile: [1.0]}, {hostile: "red"}),
    ):
        parsed = Parser(chart)
        assert "script" not in {tag for tag, _ in parsed.tags}
        assert parsed.data["series"][0]["label"] == hostile
        assert hostile in parsed.text


def test_bars_are_stacked_to_the_total():
    chart = Parser(stacked_chart("Time", [1, 2], {"a": [1.0, 2.0], "b": [3.0, 2.0]}, {"a": "red", "b": "blue"}))
    bars = [attributes for tag, attributes in chart.tags if tag == "rect"]
    for first, second in (bars[:2], bars[2:]):
        assert float(first["y"]) + float(first["height"]) == pytest.approx(100, abs=0.02)
        assert float(second["y"]) + float(second["height"]) == pytest.approx(float(first["y"]), abs=0.02)
    totals = [float(a["height"]) + float(b["height"]) for a, b in (bars[:2], bars[2:])]
    assert totals[0] == pytest.approx(totals[1], abs=0.02)


def test_many_steps_are_averaged_into_few_bars():
    steps = list(range(1, 1001))
    chart = Parser(stacked_chart("Time", steps, {"a": [2.0] * 1000}, {"a": "red"}))
    points = chart.data["series"][0]["points"]
    assert len(points) == 60
    assert {value for _, value in points} == {2.0}
    assert chart.data["left"] < points[0][0] < points[-1][0] < chart.data["right"]


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_the_mean_of_every_bin(values, limit):
    points = list(enumerate(values))
    thinned = thin_out(points, limit)
    assert len(thinned) <= max(limit, 1)
    numbers = [y for _, y in thinned if y is not None]
    given_numbers = [y for y in values if y is not None]
    assert bool(numbers) == bool(given_numbers)
    if numbers:
        assert min(given_numbers) - 1e-6 <= min(numbers) <= max(numbers) <= max(given_numbers) + 1e-6


def test_smoothing_a_constant_line_changes_nothing():
    assert smooth([(step, 3.0) for step in range(100)]) == [(step, pytest.approx(3.0)) for step in range(100)]
    assert smooth([(0, None), (1, 2.0)]) == [(1, pytest.approx(2.0))]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_linear_ticks_are_round_and_inside(low, width, count):
    high = low + width
    ticks = linear_ticks(low, high, count)
    if high - low < 1e-6 * abs(low):
        return
    assert 1 <= len(ticks) <= 2.5 * count + 1
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_ticks_of_known_ranges():
    assert linear_ticks(0, 400, 6) == [0, 100, 200, 300, 400]
    assert linear_ticks(0.03, 0.21, 5) == [0.05, 0.1, 0.15, 0.2]
    assert linear_ticks(3, 3, 5) == [3]
    assert log_ticks(0.02, 1.5) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1])
    assert log_ticks(1e-5, 10) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10])


def test_a_scale_places_its_ends():
    linear, logarithmic = Scale.over([2.0, 4.0], False), Scale.over([0.1, 10.0], True)
    for scale in (linear, logarithmic):
        assert scale.position(scale.low) == pytest.approx(0)
        assert scale.position(scale.high) == pytest.approx(1)
    assert logarithmic.position(1.0) == pytest.approx(0.5)
    assert math.isclose(linear.position(3.0), 0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0005, "0.0005"), (51.94, "51.94"), (1562, "1562"), (12_345, "12.35k"), (3.2e6, "3.2M"), (7e9, "7G")],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text
