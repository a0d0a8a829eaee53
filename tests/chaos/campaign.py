"""Which trials a campaign has, what comes of them, and the table."""

import random
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence

from chaos import on_disks, on_files, on_inputs, on_processes, on_slurm  # they add their kinds
from chaos.judge import IDENTICAL, REFUSED, SKIPPED, VIOLATION, Outcome, Skip, SlowError, Violation
from chaos.kinds import KINDS
from chaos.lab import Lab, Trial

__all__ = ["carry_out", "draw", "on_disks", "on_files", "on_inputs", "on_processes", "on_slurm"]


def draw(seed: int, kinds: Sequence[str]) -> Iterator[str]:
    """The trials of a campaign, as KIND:SEED, without end: a function of the campaign's seed. Every
    round has all kinds in another order."""
    rng = random.Random(seed)
    while True:
        batch = []
        for name in kinds:
            whole, share = divmod(KINDS[name].per_round, 1)
            batch += [name] * (int(whole) + (rng.random() < share))
        rng.shuffle(batch)
        yield from (f"{name}:{rng.randrange(10**6)}" for name in batch)


def carry_out(lab: Lab, trial: str, patience: int = 1) -> Outcome:
    """patience: how often a trial that ended too late is repeated: the machine may have been busy."""
    name, _, seed = trial.partition(":")
    began = time.monotonic()
    t = Trial(lab, name, int(seed))
    try:
        with t:
            verdict, seen = KINDS[name].carry_out(t), ""
    except SlowError as error:
        if patience:
            return carry_out(lab, trial, patience - 1)
        verdict, seen = VIOLATION, str(error)
    except Violation as error:
        verdict, seen = VIOLATION, str(error)
    except Skip as error:
        verdict, seen = SKIPPED, str(error)
    except Exception:  # noqa: BLE001 - one trial that cannot be judged must not end the others
        verdict, seen = VIOLATION, f"the campaign itself failed:\n{traceback.format_exc()}"
    if verdict == VIOLATION:
        seen = f"{'; '.join(t.notes)}\n{seen}"
    return Outcome(trial, verdict, t.setup_name, seen, time.monotonic() - began)


# ---- the table ------------------------------------------------------------------------------------

COLUMNS = (IDENTICAL, REFUSED, VIOLATION)


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown: by kind of trial, then by set-up."""
    names = {name: f"`{name}`: {kind.what}" for name, kind in KINDS.items()}
    by_kind = {name: [o for o in outcomes if o.trial.split(":")[0] == name] for name in KINDS}
    setups = sorted({o.setup for o in outcomes if o.setup})
    by_setup = {name: [o for o in outcomes if o.setup == name] for name in setups}
    parts = [rows("trial", by_kind, names), *([rows("set-up", by_setup, {})] if setups else [])]
    return "\n\n".join(parts)


def rows(what: str, groups: dict[str, list[Outcome]], names: dict[str, str]) -> str:
    lines = [f"| {what} | trials | {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|"]
    whole: list[Outcome] = []
    for name, group in groups.items():
        done = [o for o in group if o.verdict != SKIPPED]
        if done:
            lines.append(row(names.get(name, name), done))
        whole += done
    return "\n".join([*lines, row("all", whole)])


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    counts = [sum(o.verdict == column for o in outcomes) for column in COLUMNS]
    return f"| {name} | {' | '.join(map(str, [len(outcomes), *counts]))} |"


def violations(outcomes: Iterable[Outcome]) -> list[str]:
    """A paragraph per violation, which begins with the line that replays it."""
    return [
        f"python -m tests.chaos --replay {o.trial}\n{indented(o.seen)}"
        for o in outcomes
        if o.verdict == VIOLATION
    ]


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
