"""Paired comparisons: the runs of one seed share batches and held-out classes, so the differences between
two groups vary less from seed to seed than their scores do."""

from launch.compared import Comparison
from launch.records import Group, Spread, Study


def differences(group: Group, other: Group, score: str) -> list[float]:
    """The score of a group minus that of another, for every seed that both have finished."""
    theirs = {run.seed: run.number(score) for run in other.finished}
    pairs = [(run.number(score), theirs.get(run.seed)) for run in group.finished]
    return [x - y for x, y in pairs if x is not None and y is not None]


def reference(study: Study, against: str | None) -> Group | None:
    """The group of this label, or else the one with the best mean."""
    scored = [(each, spread.mean) for each in study.groups if (spread := each.spread(study.score))]
    for group, _ in scored:
        if group.label == against:
            return group
    return max(scored, key=lambda pair: pair[1])[0] if len(scored) > 1 else None


def paired(study: Study, against: str | None = None) -> Comparison | None:
    """The differences to one group, in percent points; None if no group shares two seeds with it, because
    a single difference has no spread.

    against: the label of that group; by default it is the best one.
    """
    best = reference(study, against)
    if best is None:
        return None
    rows, most = [], 0
    for group in study.groups:
        found = differences(group, best, study.score)
        if group is not best and found:
            spread = Spread.of(found)
            most = max(most, spread.n)
            error = f"{100 * spread.error:.2f}" if spread.n > 1 else ""
            each = ", ".join(f"{100 * x:+.2f}" for x in found)
            rows.append((group.label, str(spread.n), f"{100 * spread.mean:+.2f}", error, each))
    what = "Recall@1" if study.score == "recall@1" else "Recall@1 of held-out classes"
    title = f"{what} minus that of {best.label}, seed by seed, in percent points"
    header = ("runs", "shared seeds", "mean difference", "standard error", "each seed")
    return Comparison(title, header, tuple(rows)) if most > 1 else None
