"""Charts of the report as inline SVG.

The drawing is stretched to the width of the page; lines keep their width (`vector-effect`) and labels are HTML at
percentages, so that a chart stays legible on a phone. Everything that comes from a run is escaped by `Markup.format`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

Point = tuple[float, float | None]
"""x, and y or None where the run recorded no number."""

MAX_POINTS = 400
"""Points drawn per line. More of them are averaged in bins: a screen has no more columns."""
MAX_BARS = 60
LOG_SCALE_RATIO = 20.0
"""Losses that span more than this are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    color: str
    """A CSS colour of the stylesheet, such as ``var(--c1)``."""
    faint: bool = False
    """Drawn thin in the background: the noisy original of a smoothed line."""
    dots: bool = False
    """Every point is marked: for lines with few of them."""


def line_chart(title: str, series: Sequence[Series], *, from_zero: bool = False, note: str = "") -> Markup | None:
    """Lines over optimizer steps; None if no series has a number to draw.

    The y axis is logarithmic when all values are positive and span more than `LOG_SCALE_RATIO`, unless it starts at
    zero (`from_zero`).
    """
    drawn = [
        Series(line.label, thin_out(line.points, MAX_POINTS), line.color, line.faint, line.dots) for line in series
    ]
    values = [y for line in drawn for _, y in line.points if y is not None]
    if not values:
        return None
    steps = [x for line in drawn for x, _ in line.points]
    left, right = min(steps), max(max(steps), min(steps) + 1)
    logarithmic = not from_zero and min(values) > 0 and max(values) / min(values) > LOG_SCALE_RATIO
    scale = Scale.over([*values, 0.0] if from_zero else values, logarithmic)

    def place(point: Point) -> tuple[float, float] | None:
        x, y = point
        return None if y is None else ((x - left) / (right - left) * 100, 100 - scale.position(y) * 100)

    shapes = [_path(line, [place(point) for point in line.points]) for line in drawn]
    x_ticks = [(tick, (tick - left) / (right - left) * 100) for tick in linear_ticks(left, right, 6)]
    legend = [(line.label, line.color) for line in drawn if not line.faint] if len(drawn) > 1 else []
    hover = [
        {"label": line.label, "color": line.color, "points": [[x, y] for x, y in line.points]}
        for line in drawn
        if not line.faint
    ]
    data = {"left": left, "right": right, "series": hover}
    return _figure(title, legend, scale, x_ticks, Markup("").join(shapes), note, data)


def stacked_chart(
    title: str, steps: Sequence[float], stacks: Mapping[str, Sequence[float]], colors: Mapping[str, str]
) -> Markup | None:
    """Bars over optimizer steps, each cut into the named parts; None if there is nothing to draw."""
    groups = _bins(len(steps), MAX_BARS)
    means = {name: [_mean(values[group]) for group in groups] for name, values in stacks.items()}
    totals = [sum(values[i] for values in means.values()) for i in range(len(groups))]
    if not totals or max(totals) <= 0:
        return None
    scale = Scale.over([0.0, *totals], logarithmic=False)
    width = 100 / len(groups)
    shapes = []
    for i in range(len(groups)):
        bottom = 0.0
        for name, values in means.items():
            height = scale.position(values[i])
            shapes.append(
                Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" style="fill:{}"/>').format(
                    i * width + width * 0.08, 100 - (bottom + height) * 100, width * 0.84, height * 100, colors[name]
                )
            )
            bottom += height
    # Bars are equally wide; the axis reaches half a bar beyond the first and the last centre.
    centers = [_mean(steps[group]) for group in groups]
    half = (centers[-1] - centers[0]) / (len(centers) - 1) / 2 if len(centers) > 1 else 0.5
    left, right = centers[0] - half, centers[-1] + half
    x_ticks = [(tick, (tick - left) / (right - left) * 100) for tick in linear_ticks(centers[0], centers[-1], 6)]
    hover = [
        {"label": name, "color": colors[name], "points": list(zip(centers, values, strict=True))}
        for name, values in means.items()
    ]
    data = {"left": left, "right": right, "series": hover}
    legend = [(name, colors[name]) for name in means]
    return _figure(title, legend, scale, x_ticks, Markup("").join(shapes), "", data)


@dataclass(frozen=True)
class Scale:
    """A y axis: what it spans, and its ticks."""

    low: float
    high: float
    logarithmic: bool
    ticks: list[float]

    @classmethod
    def over(cls, values: Sequence[float], logarithmic: bool) -> "Scale":
        """An axis that holds all values, with some air."""
        low, high = min(values), max(values)
        if logarithmic:
            low, high = low / 1.1, high * 1.1
            return cls(low, high, True, log_ticks(low, high))
        air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (low if low == 0 else low - air), high + air
        return cls(low, high, False, linear_ticks(low, high, 5))

    def position(self, value: float) -> float:
        """Where on the axis, from 0 at the bottom to 1 at the top."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `count` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within [low, high]; powers of ten alone where that would be crowded."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]
        if len(ticks) <= 7:
            break
    return ticks


def thin_out(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of consecutive ones. A bin without any number stays a gap."""
    if len(points) <= limit:
        return list(points)
    thinned: list[Point] = []
    for part in _bins(len(points), limit):
        bin_points = points[part]
        values = [y for _, y in bin_points if y is not None]
        thinned.append((_mean([x for x, _ in bin_points]), _mean(values) if values else None))
    return thinned


def smooth(points: Sequence[Point]) -> list[Point]:
    """Exponential moving average over about a thirtieth of the line, corrected for its start; gaps are skipped."""
    decay = 1 - 1 / max(1.0, len(points) / 30)
    total = weight = 0.0
    smoothed: list[Point] = []
    for x, y in points:
        if y is not None:
            total, weight = decay * total + (1 - decay) * y, decay * weight + (1 - decay)
            smoothed.append((x, total / weight))
    return smoothed


def format_number(value: float) -> str:
    """Three significant digits, thousands and millions abbreviated."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"


def _bins(length: int, count: int) -> list[slice]:
    """`length` items in at most `count` consecutive runs of nearly equal size."""
    count = min(count, length)
    edges = [round(i * length / count) for i in range(count + 1)] if count else []
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _path(line: Series, places: Sequence[tuple[float, float] | None]) -> Markup:
    """A polyline that is interrupted at gaps; dots are segments of no length with round caps."""
    commands, marks, pen = [], [], "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        commands.append(f"{pen}{place[0]:.2f} {place[1]:.2f}")
        marks.append(f"M{place[0]:.2f} {place[1]:.2f}h0")
        pen = "L"
    dots = (
        Markup('<path class="dots" d="{}" style="stroke:{}"/>').format("".join(marks), line.color) if line.dots else ""
    )
    name = "line faint" if line.faint else "line"
    return Markup('<path class="{}" d="{}" style="stroke:{}"/>{}').format(name, "".join(commands), line.color, dots)


def _figure(
    title: str,
    legend: Sequence[tuple[str, str]],
    scale: Scale,
    x_ticks: Sequence[tuple[float, float]],
    shapes: Markup,
    note: str,
    data: Mapping[str, object],
) -> Markup:
    y_ticks = [(tick, 100 - scale.position(tick) * 100) for tick in scale.ticks]
    keys = [Markup('<li><i style="background:{}"></i>{}</li>').format(color, label) for label, color in legend]
    grid = [Markup('<path class="grid" d="M0 {0:.2f}H100"/>').format(y) for _, y in y_ticks]
    labels = [
        Markup('<span class="y" style="top:{:.2f}%">{}</span>').format(y, format_number(tick)) for tick, y in y_ticks
    ]
    labels += [
        Markup('<span class="x" style="left:{:.2f}%">{}</span>').format(x, format_number(tick)) for tick, x in x_ticks
    ]
    if scale.logarithmic:
        note = f"{note}, logarithmic" if note else "logarithmic"
    return Markup(
        '<figure class="chart" data-chart="{data}"><figcaption><b>{title}</b><small>{note}</small><ul>{keys}</ul>'
        '</figcaption><div class="plot" role="img" aria-label="{title}">'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{grid}{shapes}</svg>{labels}'
        '<div class="cursor" hidden></div><div class="tip" hidden></div></div></figure>'
    ).format(
        data=json.dumps(data),
        title=title,
        note=note,
        keys=Markup("").join(keys),
        grid=Markup("").join(grid),
        shapes=shapes,
        labels=Markup("").join(labels),
    )
