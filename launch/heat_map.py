"""A score over two settings as a map of coloured cells, with marked points."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dml.catalogue import PRESETS
from launch.plots import WIDTH, as_row, figure, number
from launch.records import Spread, Study

LEFT, TOP, RIGHT, BOTTOM = 70, 8, 8, 44
CELL_HEIGHT = 34
RATE = "optim.lr"
LIGHTEST, DARKEST = 94, 34  # lightness of the lowest and the highest score, in percent


@dataclass(frozen=True)
class Cell:
    label: str
    spread: Spread


@dataclass(frozen=True)
class Mark:
    """A point of interest: a, b, ... in the map, with its name below."""

    x: float
    y: float
    name: str


def heat_map(study: Study) -> str:
    """The score over the two settings in which the study varies, besides the rate, of which a cell shows
    the best; empty if it has others, or if they are no numbers, or if there are fewer than two values of
    each."""
    axes = [key for key in study.columns if key != RATE]
    if len(axes) != 2:
        return ""
    x_key, y_key = axes
    cells: dict[tuple[Any, Any], Cell] = {}
    for group in study.groups:
        pair, spread = (
            (group.settings.get(x_key), group.settings.get(y_key)),
            group.spread(study.score),
        )
        if spread and (pair not in cells or spread.mean > cells[pair].spread.mean):
            cells[pair] = Cell(group.label, spread)
    xs, ys = (_numbers(pair[i] for pair in cells) for i in (0, 1))
    if len(xs) < 2 or len(ys) < 2:
        return ""
    best = max(cells, key=lambda pair: cells[pair].spread.mean)
    marks = [*_published(x_key, y_key), Mark(*best, "the best of this map")]
    shown = [mark for mark in marks if xs[0] <= mark.x <= xs[-1] and ys[0] <= mark.y <= ys[-1]]
    what = "Recall@1" if study.score == "recall@1" else "Recall@1 of held-out classes"
    title = f"{what} by {x_key} and {y_key}"
    if RATE in study.columns:
        title += f", at the best of several {RATE}"
    height = TOP + BOTTOM + CELL_HEIGHT * len(ys)
    body = [
        *_axes(xs, ys, x_key, y_key, height),
        *_cells(cells, xs, ys),
        *_marks(shown, xs, ys),
    ]
    names = "".join(
        f"<span><b>{_letter(i)}</b> {escape(m.name)}</span>" for i, m in enumerate(shown)
    )
    columns = as_row(x_key, y_key, "mean", "standard error", "n")
    return figure(
        title, height, body, f'<div class="legend">{names}</div>', f'data-columns="{columns}"'
    )


def _numbers(values: Iterable[object]) -> list[float]:
    """The different values in their order; none if one of them is no number."""
    found = set(values)
    whole = all(isinstance(x, int | float) and not isinstance(x, bool) for x in found)
    return sorted(x for x in found if isinstance(x, int | float)) if whole else []


def _published(x_key: str, y_key: str) -> Iterable[Mark]:
    for name, values in PRESETS.items():
        keys = {f"loss.{key}": value for key, value in values.items()}
        if x_key in keys and y_key in keys:
            yield Mark(keys[x_key], keys[y_key], name)


def _letter(i: int) -> str:
    return "abcdefgh"[i]


def _width(xs: Sequence[float]) -> float:
    return (WIDTH - LEFT - RIGHT) / len(xs)


def _place(values: Sequence[float], value: float) -> float:
    """Where a value lies, in cells from the first one's middle; between two of them in proportion."""
    i = min(bisect_right(values, value) - 1, len(values) - 2)
    return i + (value - values[i]) / (values[i + 1] - values[i])


def _at(xs: Sequence[float], ys: Sequence[float], x: float, y: float) -> tuple[float, float]:
    """The middle of a cell, or a place between cells; y grows upwards."""
    across = LEFT + (_place(xs, x) + 0.5) * _width(xs)
    down = TOP + (len(ys) - 0.5 - _place(ys, y)) * CELL_HEIGHT
    return across, down


def _axes(
    xs: Sequence[float], ys: Sequence[float], x_key: str, y_key: str, height: float
) -> Iterable[str]:
    for x in xs:
        at, _ = _at(xs, ys, x, ys[0])
        yield f'<text class="mid" x="{at:.1f}" y="{height - BOTTOM + 16}">{number(x)}</text>'
    for y in ys:
        _, at = _at(xs, ys, xs[0], y)
        yield f'<text class="end" x="{LEFT - 6}" y="{at + 4:.1f}">{number(y)}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="mid" x="{middle}" y="{height - 6}">{escape(x_key)}</text>'
    down = TOP + CELL_HEIGHT * len(ys) / 2
    turned = f'transform="rotate(-90 12 {down})"'
    yield f'<text class="mid" x="12" y="{down}" {turned}>{escape(y_key)}</text>'


def _cells(
    cells: Mapping[tuple[float, float], Cell], xs: Sequence[float], ys: Sequence[float]
) -> Iterable[str]:
    means = [cell.spread.mean for cell in cells.values()]
    low, high = min(means), max(means)
    for (x, y), cell in cells.items():
        at, down = _at(xs, ys, x, y)
        mean, error, n = cell.spread.mean, cell.spread.error, cell.spread.n
        share = (mean - low) / (high - low) if high > low else 0.5
        light = LIGHTEST + share * (DARKEST - LIGHTEST)
        tip = f"{cell.label}: {100 * mean:.2f}% ± {100 * error:.2f}, n = {n}"
        row = as_row(x, y, mean, error, n)
        place = f'x="{at - _width(xs) / 2:.1f}" y="{down - CELL_HEIGHT / 2:.1f}"'
        size = f'width="{_width(xs):.1f}" height="{CELL_HEIGHT}"'
        fill = f'fill="hsl(215 60% {light:.0f}%)"'
        yield f'<rect {place} {size} {fill} data-row="{row}"><title>{escape(tip)}</title></rect>'
        ink = "#fff" if light < 60 else "#111"
        yield (
            f'<text class="mid cell" x="{at:.1f}" y="{down + 4:.1f}" style="fill:{ink}">'
            f"{100 * mean:.1f}</text>"
        )


def _marks(marks: Sequence[Mark], xs: Sequence[float], ys: Sequence[float]) -> Iterable[str]:
    """Letters at the edge of a cell, or between cells; those of one place stand next to each other."""
    there: Counter[tuple[float, float]] = Counter()
    for i, mark in enumerate(marks):
        at, down = _at(xs, ys, mark.x, mark.y)
        in_a_cell = mark.x in xs and mark.y in ys
        x = at - in_a_cell * (_width(xs) / 2 - 9) + 15 * there[at, down]
        there[at, down] += 1
        yield f'<circle class="mark" cx="{x:.1f}" cy="{down - 8:.1f}" r="7"/>'
        yield f'<text class="mid mark" x="{x:.1f}" y="{down - 4:.1f}">{_letter(i)}</text>'
