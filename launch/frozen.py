"""The features of a backbone without a head or training (eval.frozen): the first row of a study's table,
and what a training must beat."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

from launch.records import Group, Study

SHOWN = 8  # names of rows in a sentence

# what features depend on
OF_FEATURES = (
    *("data.dataset", "data.size", "data.resize", "model.backbone", "model.weights"),
    "engine.precision",
)


@dataclass(frozen=True)
class Frozen:
    """groups: those that train on these features. scores: of the classes that the study is about."""

    label: str
    groups: tuple[Group, ...]
    scores: Mapping[str, float]


def frozen(study: Study) -> tuple[Frozen, ...]:
    """One for the whole study, unless its runs differ in the features."""
    held_out = () if study.score == "recall@1" else ("eval.validation_classes",)
    found: dict[tuple[str, ...], list[Group]] = {}
    for group in study.groups:
        if any(run.frozen for run in group.finished):
            key = tuple(repr(group.settings.get(name)) for name in (*OF_FEATURES, *held_out))
            found.setdefault(key, []).append(group)
    return tuple(
        Frozen(
            "frozen features" + (f" of {groups[0].label}" if len(found) > 1 else ""),
            tuple(groups),
            _mean_scores(groups),
        )
        for groups in found.values()
    )


def _mean_scores(groups: list[Group]) -> dict[str, float]:
    every = [run.frozen for group in groups for run in group.finished if run.frozen]
    return {key: mean(each[key] for each in every) for key in every[0]}


def verdicts(study: Study) -> Iterator[str]:
    """Which rows do not beat the features that they began with."""
    for each in frozen(study):
        bound = each.scores["recall@1"]
        spreads = ((group.label, group.spread(study.score)) for group in each.groups)
        means = {label: spread.mean for label, spread in spreads if spread}
        failed = [label for label, score in means.items() if score <= bound]
        label = f"{each.label[0].upper()}{each.label[1:]}"
        they = f"{label} have Recall@1 {100 * bound:.2f} without any training."
        if failed:
            some = f"{len(failed)} of {len(means)} rows do not beat them"
            every = len(failed) == len(means)
            more = f", and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
            names = f"{', '.join(failed[:SHOWN])}{more}"
            yield f"{they} A failure: {'none of the rows beats them' if every else some} ({names})."
        elif means:
            gains = [f"{100 * (score - bound):.2f}" for score in means.values()]
            by = " to ".join(dict.fromkeys((min(gains, key=float), max(gains, key=float))))
            yield f"{they} Every row beats them, by {by} points."
