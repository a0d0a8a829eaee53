"""The report as one self-contained HTML page: no network, and whole without its script."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from launch.compared import Comparison
from launch.frozen import frozen
from launch.heat_map import heat_map
from launch.interaction import SCRIPT
from launch.paper import Table, tables_for
from launch.plots import Point, Series, chart, percent, reading
from launch.records import Group, Measured, Run, Spread, Study
from launch.row_chart import row_chart
from launch.run_files import CONFIG
from launch.tables import describe_missing, remarks, sections, table_cells, title_of

X_AXES = {"batch.size": "batch size", "model.embedding_size": "embedding size"}

HINT = "In a figure, drag to zoom and double-click for the whole of it."
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #68707a; --line: #d9dde2; --paper: #fff;
  --l: 42%; font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #98a1ab; --line: #343a41; --paper: #14171a; --l: 66%; } }
body { margin: 0 auto; max-width: 1120px; padding: 1.5rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; min-width: 3.5rem; color: var(--soft);
  font-weight: 500; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr));
  gap: 1.5rem; margin-top: 1.5rem; }
figure { margin: 0; max-width: 720px; } figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); }
.series { stroke: hsl(var(--h) 65% var(--l)); stroke-width: 1.8; }
.series polyline { fill: none; } .series circle { fill: hsl(var(--h) 65% var(--l)); stroke: none; }
.series.dashed polyline { stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .8rem; padding-left: 52px; }
.legend i { display: inline-block; width: 16px; margin-right: .35rem; vertical-align: middle;
  border-top: 2.5px solid hsl(var(--h) 65% var(--l)); }
.legend .dashed i { border-top-style: dashed; }
figcaption span { float: right; } figcaption button { font: inherit; font-weight: 400; padding: 0 .4rem;
  margin-left: .3rem; color: var(--soft); background: none; border: 1px solid var(--line); }
output { display: block; min-height: 1.4em; font-size: .8rem; padding-left: 52px; }
svg[data-x] { cursor: crosshair; touch-action: none; }
.near { r: 5; stroke: var(--ink) !important; stroke-width: 1.5; }
.frame { fill: hsl(215 60% 50% / .15); stroke: var(--soft); } .frame:not([width]) { display: none; }
circle.mark { fill: #fff; stroke: #111; } svg text.mark { fill: #111; font-weight: 700; }
pre { overflow-x: auto; font-size: .8rem; color: var(--soft); }
"""


def page(
    studies: Sequence[Study],
    tables: Sequence[Table],
    searches: Mapping[str, Comparison],
    against: str | None = None,
    out: Path | None = None,
) -> str:
    """searches: study -> the state of its search. against: see launch/paired.py. out: the folder that the
    page goes into, from which it links the runs; None for a list of them without links."""
    title = f"Report: {', '.join(study.name for study in studies)}"
    body = "\n".join(section(study, tables, searches, against, out) for study in studies)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"<h1>Report</h1>\n<p>{HINT}</p>\n{body}\n<script>{SCRIPT}</script>\n</html>\n"
    )


def section(
    study: Study,
    tables: Sequence[Table],
    searches: Mapping[str, Comparison],
    against: str | None,
    out: Path | None,
) -> str:
    found = table_cells(study, tables)
    parts = [f"<h2>{escape(study.name)}</h2>"]
    parts += [f"<p>{escape(' '.join(remarks(study, tables)))}</p>"]
    if found.rows:
        parts.append(_table(found.header, found.rows))
    if study.without_result():
        items = "\n".join(_missing(run) for run in study.without_result())
        parts.append(f"<h3>Without a result</h3>\n<ul>\n{items}\n</ul>")
    drawn = "\n".join(filter(None, figures(study, tables_for(study, tables))))
    parts.append(f'<div class="figures">\n{drawn}\n</div>')
    for each in sections(study, tables, searches, against):
        parts += [f"<h3>{escape(each.title)}</h3>", _table(each.header, each.rows)]
    parts.append(_runs(study, out))
    return "\n".join(parts)


def _runs(study: Study, out: Path | None) -> str:
    """Every run that started, with its score; with `out` also links into its folder."""
    header = ("run", "state", title_of(study.score), *(("config", "picture") if out else ()))
    rows = []
    for run in study.runs:
        if run.folder:
            score = run.number(study.score)
            number = "" if score is None else f"{100 * score:.2f}"
            cells = [escape(run.name), escape(run.state), number]
            if out:
                cells[0] = _link(run.folder, run.name, out)
                cells += [
                    _link(run.folder / name, name, out) if (run.folder / name).exists() else ""
                    for name in (CONFIG, "nearest.png")
                ]
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head, body = f"<thead>{_row('th', header)}</thead>", "\n".join(rows)
    table = f'<div class="wide"><table>\n{head}\n{body}\n</table></div>'
    return f"<details><summary>All runs: {len(rows)}</summary>\n{table}\n</details>"


def _link(target: Path, text: str, out: Path) -> str:
    path = os.path.relpath(target, out.resolve())
    return f'<a href="{escape(quote(os.fsencode(path)))}">{escape(text)}</a>'


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = "\n".join(_row("td", row) for row in rows)
    head = f"<thead>{_row('th', header)}</thead>"
    return f'<div class="wide"><table>\n{head}\n{lines}\n</table></div>'


def _row(tag: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"


def _missing(run: Run) -> str:
    log = "\n".join(run.log)
    shown = f"<details><summary>log</summary><pre>{escape(log)}</pre></details>" if log else ""
    return f"<li>{escape(describe_missing(run))}{shown}</li>"


# ---- figures ------------------------------------------------------------------------------------


def figures(study: Study, papers: Sequence[Table]) -> Iterable[str]:
    yield heat_map(study)
    yield row_chart(f"{title_of(study.score)} of every row", study)
    for key in (key for key in X_AXES if key in study.varying):
        yield from _by_setting(study, key, [table for table in papers if table.by == key])
    for split in dict.fromkeys(each.split for run in study.runs for each in run.evaluations):
        title = f"Recall@1 of the {split} classes, against"
        mean = " (mean of the finished seeds; it ends where the first of them stops)"

        def of_split(run: Run, split: str = split) -> list[Measured]:
            return [each for each in run.evaluations if each.split == split]

        images, steps = (
            _curves(study, of_split, x) for x in (lambda e: e.images, lambda e: e.step)
        )
        yield chart(f"{title} images seen{mean}", "images", images)
        yield chart(f"{title} steps{mean}", "steps", steps, log_x=True)
    if any(each.share for run in study.runs for each in run.without_pairs):
        shares = _curves(study, lambda run: run.without_pairs, lambda e: e.images)
        yield chart("Share of the steps so far without informative pairs", "images", shares)


def _by_setting(study: Study, key: str, papers: Sequence[Table]) -> Iterable[str]:
    name = X_AXES[key]
    same = [_paper_series(table, key) for table in papers if table.dataset in study.datasets]
    others = [_paper_series(table, key) for table in papers if table.dataset not in study.datasets]
    scores = [*_our_series(study, key, study.score), *_frozen_series(study, key)]
    yield chart(f"{title_of(study.score)} by {name}", name, [*scores, *same], log_x=True)
    yield chart(f"The paper's Recall@1 by {name}, of other datasets", name, others, log_x=True)
    if key == "batch.size":
        title = f"Share of steps without informative pairs by {name}"
        yield chart(title, name, _our_series(study, key, "steps_without_pairs"), log_x=True)


def _our_series(study: Study, key: str, score: str) -> list[Series]:
    found: dict[str, list[Point]] = {}
    for group in study.groups:
        spread, x = group.spread(score), group.settings[key]
        if spread is not None:
            point = _point(x, spread, f"{group.label}: ")
            found.setdefault(_without_value(group.label, x), []).append(point)
    return [
        Series(name, tuple(sorted(points, key=lambda p: p.x))) for name, points in found.items()
    ]


def _frozen_series(study: Study, key: str) -> list[Series]:
    """The features without training, as a line over all values of the setting."""
    xs = [group.settings[key] for group in study.groups if group.finished]
    series = []
    for each in frozen(study):
        y = each.scores["recall@1"]
        points = tuple(Point(x, y, y, y, f"{each.label}: {percent(y)}") for x in (min(xs), max(xs)))
        series.append(Series(each.label, points, dashed=True))
    return series


def _without_value(label: str, x: object) -> str:
    """The label without its value on the x axis: bs320-scaled at 320 belongs to series `scaled`."""
    return re.sub(rf"(^|-)[a-z_]*{x}(?=-|$)", "", label).strip("-") or "ours"


def _paper_series(table: Table, key: str) -> Series:
    pairs = [(row.where[key], row.recall["recall@1"] / 100) for row in table.rows]
    points = tuple(Point(x, y, y, y, f"{x}: {percent(y)}") for x, y in pairs)
    return Series(f"paper on {table.dataset}, {table.table}", points, dashed=True)


def _curves(
    study: Study, of_run: Callable[[Run], Sequence[Measured]], x_of: Callable[[Measured], int]
) -> list[Series]:
    """The mean of each group's finished seeds, at the steps that all of them evaluated."""
    series = []
    for group in study.groups:
        runs = [found for run in group.finished if (found := of_run(run))]
        steps = [{each.step for each in evaluations} for evaluations in runs]
        shared = sorted(set.intersection(*steps)) if steps else []
        points = tuple(_mean_at(group, step, runs, x_of) for step in shared)
        if len(points) > 1:
            series.append(Series(group.label, points))
    return series


def _mean_at(
    group: Group, step: int, runs: Sequence[Sequence[Measured]], x_of: Callable[[Measured], int]
) -> Point:
    found = [each for evaluations in runs for each in evaluations if each.step == step]
    spread = Spread.of([each.share for each in found])
    where = f"{group.label}, step {step:,}, {found[0].images:,} images: "
    return _point(x_of(found[0]), spread, where)


def _point(x: float, spread: Spread, where: str) -> Point:
    """A mean with its standard error as a bar."""
    low, high = spread.mean - spread.error, spread.mean + spread.error
    return Point(x, spread.mean, low, high, f"{where}{reading(spread)}")
