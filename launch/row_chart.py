"""A score of every row as a dot, for rows that differ in a name, such as that of the loss."""

from collections.abc import Iterable
from html import escape

from launch.frozen import Frozen, frozen
from launch.plots import WIDTH, Axis, as_row, figure, linear_axis, percent, reading
from launch.records import Spread, Study

LEFT, RIGHT, TOP, BOTTOM = 200, 14, 8, 24
ROW_HEIGHT = 20
MOST_ROWS = 40
LONGEST = 30  # letters of a label that fit beside its dot


def row_chart(title: str, study: Study) -> str:
    """The best row first, with the frozen features as a line. Empty if the rows differ in numbers alone,
    or if they are too many."""
    found = [
        (group.label, spread) for group in study.groups if (spread := group.spread(study.score))
    ]
    names = any(
        isinstance(group.settings.get(key), str) for key in study.varying for group in study.groups
    )
    if not names or not 2 <= len(found) <= MOST_ROWS:
        return ""
    rows = sorted(found, key=lambda row: -row[1].mean)
    lines = frozen(study)
    ends = [
        end
        for _, spread in rows
        for end in (spread.mean - spread.error, spread.mean + spread.error)
    ]
    ends += [each.scores["recall@1"] for each in lines]
    axis = linear_axis(min(ends), max(ends), LEFT, WIDTH - RIGHT)
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    body = [*_grid(axis, height), *_labels(label for label, _ in rows)]
    body += [*_lines(lines, axis, height), *_dots(rows, axis)]
    legend = "".join(
        f'<span style="--h:0" class="dashed"><i></i>{escape(each.label)}</span>' for each in lines
    )
    columns = as_row("row", "mean", "standard error", "n")
    return figure(
        title, height, body, f'<div class="legend">{legend}</div>', f'data-columns="{columns}"'
    )


def _grid(axis: Axis, height: float) -> Iterable[str]:
    for tick in axis.ticks:
        at = f"{axis.at(tick):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        yield f'<text class="mid" x="{at}" y="{height - 8}">{percent(tick)}</text>'


def _labels(labels: Iterable[str]) -> Iterable[str]:
    for i, label in enumerate(labels):
        shown = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
        yield f'<text class="end" x="{LEFT - 8}" y="{_middle(i) + 4}">{escape(shown)}</text>'


def _middle(i: int) -> float:
    return TOP + ROW_HEIGHT * (i + 0.5)


def _lines(lines: Iterable[Frozen], axis: Axis, height: float) -> Iterable[str]:
    for each in lines:
        at = f"{axis.at(each.scores['recall@1']):.1f}"
        points = f"{at},{TOP} {at},{height - BOTTOM}"
        yield f'<g class="series dashed" style="--h:0"><polyline points="{points}"/></g>'


def _dots(rows: Iterable[tuple[str, Spread]], axis: Axis) -> Iterable[str]:
    yield '<g class="series" style="--h:250">'
    for i, (label, spread) in enumerate(rows):
        y = _middle(i)
        tip = f"{label}: {reading(spread)}"
        if spread.error:
            low, high = (axis.at(spread.mean + sign * spread.error) for sign in (-1, 1))
            yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        row = as_row(label, spread.mean, spread.error, spread.n)
        place = f'cx="{axis.at(spread.mean):.1f}" cy="{y}" r="3"'
        yield f'<circle {place} data-row="{row}"><title>{escape(tip)}</title></circle>'
    yield "</g>"
