"""What a trial may end in: an identical result, or a clear refusal. Everything else is a violation."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

IDENTICAL, REFUSED, VIOLATION, SKIPPED = "identical", "refused", "violations", "skipped"
FINISHED, UNEXPECTED, MISTAKE, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 75  # exit codes of dml/train.py
# A frame of our code in a traceback; launchers print tracebacks of their own when a rank fails.
FRAME = re.compile(r'^(?:\[rank\d+\]: )?\s*File "[^"]*/(?:dml|launch|shards)/.*', re.MULTILINE)
SENTENCE = re.compile(r"^(?:dml|launch|shards)/\w+\.py: \S", re.MULTILINE)
MOST_WORDS = 20_000  # characters of output; a refusal is read by a person


class Violation(Exception):
    """The contract is broken; the text says what was seen."""


class SlowError(Violation):
    """It ended, but too late. That may be the machine's fault: the trial is repeated once."""


class Skip(Exception):
    """The trial cannot be carried out here; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on a trial. seen: the violation, or why it was skipped."""

    trial: str
    verdict: str
    setup: str = ""
    seen: str = ""
    seconds: float = 0.0


def last_lines(said: str, count: int = 12) -> str:
    return "\n".join(said.strip().splitlines()[-count:])


def no_traceback(said: str, why: str) -> None:
    """Our code must not print a traceback for a mistake."""
    found = FRAME.search(said)
    if found:
        around = said[max(0, said.rfind("Traceback", 0, found.start())) :][:2000]
        raise Violation(f"a traceback {why}:\n{around}\n...\n{last_lines(said, 3)}")


def is_refusal(code: int, said: str) -> None:
    """Exit code 2, a sentence, and no traceback."""
    no_traceback(said, "for a mistake")
    if code != MISTAKE:
        raise Violation(f"exit code {code} for a mistake:\n{last_lines(said)}")
    if not said.strip():
        raise Violation(f"exit code 2 without a sentence:\n{last_lines(said)}")
    if len(said) > MOST_WORDS:
        raise Violation(f"a refusal of {len(said):,} characters")


# ---- results --------------------------------------------------------------------------------------


def content(run: Path) -> dict[str, bytes]:
    """The files of a finished run that must be the same to the byte; result.json without its time."""
    result = json.loads((run / "result.json").read_bytes())
    result.pop("seconds")
    return {
        "metrics.jsonl": (run / "metrics.jsonl").read_bytes(),
        "model.safetensors": (run / "model.safetensors").read_bytes(),
        "result.json": json.dumps(result, sort_keys=True).encode(),
    }


def is_identical(run: Path, expected: dict[str, bytes]) -> None:
    try:
        found = content(run)
    except (OSError, ValueError, KeyError) as error:
        raise Violation(f"exit code 0 without a result: {error!r}") from None
    if found["metrics.jsonl"] != expected["metrics.jsonl"]:
        raise Violation(changed_lines(found["metrics.jsonl"], expected["metrics.jsonl"]))
    changed = [name for name in expected if found[name] != expected[name]]
    if changed:
        raise Violation(f"a changed result: {', '.join(changed)}")
    nothing_half_written(run)


def changed_lines(found: bytes, expected: bytes) -> str:
    ours, theirs = found.splitlines(), expected.splitlines()
    counts = f"{len(ours)} lines instead of {len(theirs)}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a != b:
            return f"a changed result: metrics.jsonl, {counts}, line {number} is {a!r}, not {b!r}"
    return f"a changed result: metrics.jsonl, {counts}"


def nothing_half_written(run: Path) -> None:
    left = sorted(str(path.relative_to(run)) for path in run.rglob("*.writing"))
    if left:
        raise Violation(f"half-written files are left: {', '.join(left)}")
