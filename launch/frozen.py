"""The features of a backbone without a head or training (eval.frozen): the first row of a study's table,
and what a training must beat."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

from launch.records import Group, Study

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
        means = {
            group.label: spread.mean
            for group in each.groups
            if (spread := group.spread(study.score))
        }
        failed = [label for label, score in means.items() if score <= bound]
        they = f"{each.label[0].upper()}{each.label[1:]} have Recall@1 {100 * bound:.2f} without any training."
        if failed:
            share = (
                "none of the rows beats"
                if len(failed) == len(means)
                else f"{len(failed)} of {len(means)} rows do not beat"
            )
            yield f"{they} A failure: {share} them ({', '.join(failed)})."
        else:
            yield f"{they} Every row beats them, by {100 * (min(means.values()) - bound):.2f} to {100 * (max(means.values()) - bound):.2f} points."
