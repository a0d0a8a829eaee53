"""Line charts as inline SVG, without dependencies, readable on light and dark pages.

What the page's script (launch/interaction.py) needs stands in attributes: the axes of a chart, and the
line of a CSV file of every point.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from launch.records import Spread

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40


@dataclass(frozen=True)
class Point:
    """low and high: the ends of the bar around y, which is a mean."""

    x: float
    y: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A scale from values to pixels, with its ticks; log: logarithmic."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low!r} {self.high!r} {self.start} {self.end} {int(self.log)}"

    def at(self, value: float) -> float:
        low, high, x = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (x - low) / (high - low) * (self.end - self.start)


def number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.6g}k"
    return f"{value:,.6g}"


def percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def reading(spread: Spread) -> str:
    """What is shown under the mouse: 24.3% ± 0.12, n = 3."""
    error = f" ± {100 * spread.error:.2f}" if spread.n > 1 else ""
    return f"{percent(spread.mean)}{error}, n = {spread.n}"


def chart(title: str, x_label: str, series: Sequence[Series], *, log_x: bool = False) -> str:
    """A figure of fractions in percent, with title, plot and legend; empty if there are no points."""
    if log_x:  # a logarithmic axis has no step 0
        series = [replace(s, points=tuple(p for p in s.points if p.x > 0)) for s in series]
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs = sorted({point.x for point in points})
    sides = LEFT, WIDTH - RIGHT
    x_axis = _log_axis(xs, *sides) if log_x else linear_axis(0, xs[-1], *sides)
    lows, highs = [point.low for point in points], [point.high for point in points]
    y_axis = linear_axis(min(lows), max(highs), HEIGHT - BOTTOM, TOP)
    inside = f"{LEFT - 4} {TOP - 4} {WIDTH - LEFT - RIGHT + 8} {HEIGHT - TOP - BOTTOM + 8}"
    x, y, width, height = inside.split()
    body = ['<g class="ticks">', *_grid(x_axis, y_axis), "</g>"]
    # an SVG inside: what leaves it in a zoom is not drawn
    body.append(f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{inside}">')
    body += [*_lines(series, x_axis, y_axis), "</svg>"]
    middle = (LEFT + WIDTH - RIGHT) / 2
    body.append(f'<text x="{middle}" y="{HEIGHT - 4}" class="mid">{escape(x_label)}</text>')
    legend = "".join(
        f'<span style="{_hue(i, len(series))}" class="{_style(one)}"><i></i>{escape(one.name)}</span>'
        for i, one in enumerate(series)
        if one.name
    )
    columns = as_row("series", x_label, "mean", "low", "high")
    axes = f'data-x="{x_axis}" data-y="{y_axis}" data-columns="{columns}"'
    return figure(title, HEIGHT, body, f'<div class="legend">{legend}</div>', axes)


def figure(title: str, height: float, body: Sequence[str], legend: str, attributes: str) -> str:
    """attributes: of the SVG, for the page's script."""
    svg, name = "\n".join(body), escape(title)
    return (
        f"<figure><figcaption>{name}</figcaption>\n"
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{name}" {attributes}>\n{svg}\n'
        f"</svg>\n{legend}</figure>"
    )


def as_row(*values: object) -> str:
    """A line of a CSV file, as the value of an attribute."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return escape(text.getvalue())


def _style(series: Series) -> str:
    return "dashed" if series.dashed else "solid"


def _hue(i: int, n: int) -> str:
    """Colours from blue over green to red, in the order of the series."""
    return f"--h:{round(250 - 250 * i / max(n - 1, 1))}"


def linear_axis(low: float, high: float, start: float, end: float) -> Axis:
    if high <= low:  # a single value: make room around it
        low, high = 0.9 * low, 1.1 * high or 1.0
    step: float = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _log_axis(xs: Sequence[float], start: float, end: float) -> Axis:
    """Up to 8 values are the ticks themselves; more get ticks at 1, 2 and 5 times powers of ten."""
    low, high = xs[0] / 2**0.3, xs[-1] * 2**0.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_values = [factor * 10.0**n for n in decades for factor in (1, 2, 5)]
    ticks = xs if len(xs) <= 8 else [x for x in round_values if low <= x <= high]
    return Axis(low, high, start, end, tuple(ticks), log=True)


def _grid(x: Axis, y: Axis) -> Iterable[str]:
    for tick in y.ticks:
        at = f"{y.at(tick):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text class="end" x="{LEFT - 6}" y="{y.at(tick) + 4:.1f}">{percent(tick)}</text>'
    for tick in x.ticks:
        yield f'<text class="mid" x="{x.at(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{number(tick)}</text>'


def _lines(series: Sequence[Series], x: Axis, y: Axis) -> Iterable[str]:
    for i, one in enumerate(series):
        path = " ".join(f"{x.at(p.x):.1f},{y.at(p.y):.1f}" for p in one.points)
        style = f'class="series {_style(one)}" style="{_hue(i, len(series))}"'
        yield f'<g {style}><polyline points="{path}"/>'
        for p in one.points:
            at = f"{x.at(p.x):.1f}"
            if p.low < p.high:
                ends = f'y1="{y.at(p.low):.1f}" y2="{y.at(p.high):.1f}"'
                yield f'<line x1="{at}" x2="{at}" {ends}/>'
            tip = f"<title>{escape(p.tip)}</title>"
            row = as_row(one.name, p.x, p.y, p.low, p.high)
            yield f'<circle cx="{at}" cy="{y.at(p.y):.1f}" r="3" data-row="{row}">{tip}</circle>'
        yield "</g>"
