"""What a key of a section says of itself, and the rules of single keys."""

import re
from dataclasses import MISSING, field
from typing import Any

from dml.catalogue import BACKBONES, TRACKERS, tracker_names
from dml.rules import ANY, Rule

BACKBONE = Rule(
    f"one of {', '.join(BACKBONES)}, none, or timm:NAME",
    lambda name: name in (*BACKBONES, "none") or re.fullmatch(r"timm:[!-~]+", name) is not None,
    (*BACKBONES, "none"),
)
PART = Rule("above 0, at most 1", lambda x: 0 < x <= 1)
WEIGHTS = Rule("not empty, all above 0", lambda given: bool(given) and min(given) > 0)
SIZES = Rule(
    "each at least 1, at most 100,000", lambda given: all(1 <= size <= 100_000 for size in given)
)

TRACKER_NAMES = Rule(
    f"names of {', '.join(TRACKERS)}, each once, with commas between them",
    lambda text: (
        set(tracker_names(text)) <= set(TRACKERS)
        and len(set(tracker_names(text))) == len(tracker_names(text))
    ),
)


def key(
    meaning: str,
    *,
    default: Any = MISSING,
    rule: Rule = ANY,
    example: object = None,
    execution: bool = False,
    later: bool = False,
) -> Any:
    """A key of a section.

    example: shown in errors where there is no default to show. execution: the key says how a run is
    carried out, not what it learns, so it may change when the run is resumed, and reports ignore it.
    later: the key came after runs without it; at its default it is no part of what was learned, so that
    these runs can be resumed.
    """
    metadata = {"meaning": meaning, "rule": rule, "example": example, "execution": execution}
    metadata |= {"later": later}
    return field(default=default, metadata=metadata)
