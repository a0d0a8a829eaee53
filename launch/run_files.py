"""The small files of a run's folder, read and checked: a damaged one is an error that names it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dml.config import Config, load
from dml.errors import ConfigError
from dml.run_folder.files import DamagedError, read_json, read_lines
from dml.run_folder.folder import RESULT

FAILED, RESTARTS, PLAN, CONFIG = "failed.json", "restarts.json", "plan.json", "config.yaml"
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
# how the names of scores begin
SCORES = ("recall@", "r_precision", "map@r", "validation_", "untrained_")
AMOUNTS = ("images", "step", "trained_steps", "seconds", "world_size")

Test = Callable[[Any], bool]


def number(high: float, low: float = 0, kinds: tuple[type, ...] = (int, float)) -> Test:
    """Whether a value is a number between two others; true, NaN and infinity are not."""
    return lambda value: type(value) in kinds and low <= value <= high


is_whole = number(10**15, kinds=(int,))
is_amount = number(1e15)
is_share = number(1 + 1e-6)  # allows for rounding
is_speed = number(1e15, low=1e-6)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_log(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def wrong_key(content: Mapping[str, Any], tests: Mapping[str, Test]) -> str | None:
    """The first key whose value is not what it must be. A key may be absent, or null."""
    wrong = (k for k, test in tests.items() if content.get(k) is not None and not test(content[k]))
    return next(wrong, None)


def read_checked(
    path: Path, tests: Mapping[str, Test], required: str | None = None
) -> dict[str, Any] | None:
    """A JSON file, None if there is none; DamagedError if it is not as described."""
    content = read_json(path)
    if content is not None:
        wrong = wrong_key(content, tests)
        if wrong is None and required is not None and content.get(required) is None:
            wrong = required
        if wrong is not None:
            raise DamagedError(path, f"{wrong} is missing or has a wrong value")
    return content


def read_result(folder: Path) -> dict[str, Any] | None:
    tests = dict.fromkeys(AMOUNTS, is_amount) | {"step": is_whole, "steps_without_pairs": is_share}
    result = read_checked(folder / RESULT, tests, "step")
    scores = [key for key in result or () if key.startswith(SCORES)]
    if wrong := wrong_key(result or {}, dict.fromkeys(scores, is_share)):
        raise DamagedError(folder / RESULT, f"{wrong[:60]} is not a fraction")
    return result


def read_failed(folder: Path) -> dict[str, Any] | None:
    return read_checked(folder / FAILED, {"reason": is_text, "log": is_log}, "reason")


def read_restarts(folder: Path) -> dict[str, Any]:
    """Empty if the run was never started again."""
    tests = {"step": is_whole, "times": is_whole, "note": is_text}
    return read_checked(folder / RESTARTS, tests) or {}


def read_planned_steps(folder: Path) -> int | None:
    steps: int | None = (read_checked(folder / PLAN, {"steps": is_whole}) or {}).get("steps")
    return steps


def read_config(folder: Path) -> Config:
    """DamagedError if config.yaml cannot be read; ConfigError if this version does not accept it."""
    path = folder / CONFIG
    if path.exists() and not path.is_file():
        raise DamagedError(path, "not a regular file")
    try:
        return load(path)
    except ConfigError as error:
        first = error.problems[0]
        if first.key == str(path):  # a problem of the file, not of a key
            raise DamagedError(path, first.rule) from None
        raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    tests = {"step": is_whole, "split": is_text}
    tests |= dict.fromkeys(("recall@1", "steps_without_pairs"), is_share)
    return _sound_lines(folder / METRICS, tests)


def read_speeds(folder: Path) -> list[float]:
    """Images per second of all processes together, in the order in which they were measured."""
    lines = _sound_lines(folder / TIMING, {"step": is_whole, "images_per_second": is_speed})
    return [speed for line in lines if (speed := line.get("images_per_second")) is not None]


def _sound_lines(path: Path, tests: Mapping[str, Test]) -> list[dict[str, Any]]:
    """The lines with a step; damaged lines are skipped, unless there are no others."""
    lines = read_lines(path)
    sound = [
        line for line in lines if line.get("step") is not None and wrong_key(line, tests) is None
    ]
    if lines and not sound:
        raise DamagedError(path, "none of its lines is one that a run writes")
    return sound
