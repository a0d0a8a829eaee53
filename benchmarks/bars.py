"""The ratios of all benchmarks as one SVG: a bar from 1 to the ratio, and a mark at the goal.

The axis is logarithmic, so that half is as far from 1 as double. Bars beyond the axis end at its edge.
The picture has its own background, so that it is readable in light and dark mode.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from measure import Row, number

from launch.plots import Axis

WIDTH, LEFT, RIGHT, TOP, LINE = 960, 520, 70, 40, 17
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
AXIS = Axis(TICKS[0], TICKS[-1], LEFT, WIDTH - RIGHT, TICKS, log=True)
STYLE = """
svg { --ink: #1c2024; --soft: #68707a; --line: #d9dde2; --paper: #fff; --met: #2f7fc1;
  --missed: #c8402f; --none: #a3abb5; }
@media (prefers-color-scheme: dark) { svg { --ink: #e4e7eb; --soft: #98a1ab; --line: #343a41;
  --paper: #14171a; --met: #5aa7e6; --missed: #ee7465; --none: #5d656e; } }
text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.soft { fill: var(--soft); } .part { font-weight: 600; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); } .one { stroke: var(--soft); }
.goal { stroke: var(--ink); stroke-width: 2; }
.met { fill: var(--met); } .missed { fill: var(--missed); } .none { fill: var(--none); }
"""


def picture(rows: Sequence[Row]) -> str:
    body, y = [], TOP
    for part, own in groupby(rows, key=lambda row: row.part):
        body.append(f'<text class="part" x="12" y="{y + 13}">{escape(part)}</text>')
        y += LINE
        for row in own:
            body += bar(row, y)
            y += LINE
    height = y + 16
    box = f'viewBox="0 0 {WIDTH} {height}" role="img"'
    says = (
        "ratio to what a row is compared with; vertical mark: the goal; red: missed; grey: no goal"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} aria-label="Ratios and their goals">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" style="fill: var(--paper)"/>',
            f'<text class="soft" x="12" y="15">{says}</text>',
            *grid(y),
            *body,
            "</svg>\n",
        ]
    )


def grid(bottom: float) -> Iterable[str]:
    for tick in AXIS.ticks:
        at, kind = f"{AXIS.at(tick):.1f}", "one" if tick == 1 else "grid"
        yield f'<line class="{kind}" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="soft mid" x="{at}" y="{TOP - 4}">{number(tick)}</text>'


def bar(row: Row, y: float) -> Iterable[str]:
    one, end = AXIS.at(1), AXIS.at(min(max(row.ratio, AXIS.low), AXIS.high))
    kind = {None: "none", True: "met", False: "missed"}[row.ok]
    text = f"{row.what} / {row.against}"
    yield f'<text x="24" y="{y + 12}">{escape(text)}</text>'
    yield (
        f'<rect class="{kind}" x="{min(one, end):.1f}" y="{y + 3}" '
        f'width="{max(abs(end - one), 1):.1f}" height="{LINE - 6}"/>'
    )
    if row.bound:
        at = f"{AXIS.at(row.bound):.1f}"
        yield f'<line class="goal" x1="{at}" x2="{at}" y1="{y + 1}" y2="{y + LINE - 2}"/>'
    yield f'<text class="soft end" x="{WIDTH - 8}" y="{y + 12}">{number(row.ratio)}</text>'
