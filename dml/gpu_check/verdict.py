"""What the checks found: a line each, with a verdict, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# slow: right, but beyond the goal. skipped: it cannot run here, and the text says why.
OK, SLOW, FAILED, SKIPPED = "ok", "slow", "failed", "skipped"
VERDICTS = (OK, SLOW, FAILED, SKIPPED)


@dataclass(frozen=True)
class Line:
    """figures: numbers and words behind the text, for whoever reads the JSON."""

    name: str
    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.verdict:<7} {self.name:<28} {self.text}"


def within(name: str, value: float, goal: float, text: str, **figures: Any) -> Line:
    """A line that is ok if a value is at most the goal; nan is not."""
    return Line(name, OK if value <= goal else FAILED, text, {**figures, "goal": goal})


def summary(lines: Sequence[Line]) -> str:
    counts = {each: sum(line.verdict == each for line in lines) for each in VERDICTS}
    return ", ".join(f"{count} {each}" for each, count in counts.items() if count)


def as_json(lines: Sequence[Line], about: Mapping[str, str]) -> str:
    tree = {**about, "summary": summary(lines), "lines": [asdict(line) for line in lines]}
    return json.dumps(tree, indent=1) + "\n"


def page(lines: Sequence[Line], about: Mapping[str, str]) -> str:
    """Markdown: a table with a row per line, then what does not fit into one."""
    told = ", ".join(f"{key} {value}" for key, value in about.items())
    rows = [f"| {x.verdict} | {x.name} | {x.text.replace('|', ' ')} |" for x in lines]
    blocks = [
        f"## {line.name}: {key}\n\n```text\n{value.rstrip()}\n```"
        for line in lines
        for key, value in line.figures.items()
        if isinstance(value, str) and "\n" in value
    ]
    head = [f"# GPU check: {summary(lines)}", told, "\n".join(["| | | |", "|---|---|---|", *rows])]
    return "\n\n".join([*head, *blocks]) + "\n"
