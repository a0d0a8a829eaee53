"""Our results beside the paper's: the rows of a study as Markdown, and every run as CSV."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dml.catalogue import PRESETS
from launch.compared import Comparison, comparisons
from launch.frozen import Frozen, frozen, verdicts
from launch.paired import paired
from launch.paper import Table, paper_score, tables_for
from launch.records import Group, Run, Spread, Study
from launch.run_files import SCORES

AMOUNTS = ("images", "step", "trained_steps", "seconds", "images_per_second")
MOST_PARAMETERS = 6  # that are listed in a sentence
SPREAD = "Fractions in percent: the mean over n seeds ± its standard error (lowest to highest)."


@dataclass(frozen=True)
class Cells:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_cells(study: Study, tables: Sequence[Table]) -> Cells:
    """A row per group: its settings, our scores, the paper's, and the images and seconds it took. Before
    them the features that training began with, if they were evaluated."""
    papers = tables_for(study, tables)
    others = [key for key in score_names(study.runs) if key != study.score]
    header = (
        *("runs", *study.shown, "n", title_of(study.score)),
        *(_paper_title(study, table) for table in papers),
        *("steps without pairs", "images", "steps", "trained steps", "seconds", "images/s"),
        *map(title_of, others),
    )
    blank = "", *[""] * len(AMOUNTS)
    first = tuple(
        (
            *(each.label, *[""] * len(study.shown), "", f"{100 * each.scores['recall@1']:.2f}"),
            *([""] * len(papers)),
            *blank,
            *(_of_features(each, key) for key in others),
        )
        for each in frozen(study)
    )
    rows = tuple(
        (
            *(group.label, *(_value(group.settings.get(key)) for key in study.shown)),
            *(_count(group), _percent(group.spread(study.score), whole=True)),
            *(_paper_score(group, table) for table in papers),
            _percent(group.spread("steps_without_pairs"), whole=True),
            *(_number(group.spread(key)) for key in AMOUNTS),
            *(_percent(group.spread(key)) for key in others),
        )
        for group in study.groups
    )
    return Cells(header, (*first, *rows))


def _of_features(found: Frozen, key: str) -> str:
    return f"{100 * found.scores[key]:.2f}" if key in found.scores else ""


def score_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """recall@1, recall@10, ..., r_precision, map@r, then those of held-out classes and of the untrained
    model, if any."""
    names = dict.fromkeys(key for run in runs for key in run.result if run.number(key) is not None)
    return tuple(sorted((k for k in names if k.startswith(SCORES)), key=_score_order))


def _score_order(key: str) -> tuple[bool, bool, int]:
    _, _, k = key.partition("recall@")
    return (
        key.startswith(("validation_", "untrained_")),
        not k,
        int(k) if re.fullmatch("[0-9]{1,9}", k) else 0,
    )


def remarks(study: Study, tables: Sequence[Table]) -> list[str]:
    """The sentences above a study's table."""
    states = Counter(run.state for run in study.runs)
    sentences = [", ".join(f"{count} {state}" for state, count in states.items()) + "."]
    seconds = [x for run in study.runs if (x := run.number("seconds")) is not None]
    if seconds:
        sentences.append(f"{sum(seconds) / 3600:.2f} hours of training in all. {SPREAD}")
    if any(group.settings["eval.validation_classes"] for group in study.groups):
        sentences.append(
            "With held-out classes, images and steps are counted up to the best step, trained steps "
            "up to the end."
        )
    sentences += [
        *verdicts(study),
        *_loss_parameters(study),
        *_training_classes(study),
        *_patience(study),
    ]
    repeats = ", ".join(run.name for group in study.groups for run in group.repeats)
    if repeats:
        sentences.append(
            f"Not counted, because another run has their settings and seed: {repeats}."
        )
    papers = tables_for(study, tables)
    others = [table.dataset for table in papers if table.dataset not in study.datasets]
    if others:
        names = ", ".join(dict.fromkeys(others))
        sentences.append(
            f"The paper's scores are on other datasets ({names}): compare the trend, not the values."
        )
    sentences += [
        f"{table.table} on {table.dataset}: {table.note}." for table in papers if table.note
    ]
    follows = [key for key in study.varying if key not in study.shown]
    if follows:
        sentences.append(f"These settings change with the columns shown: {', '.join(follows)}.")
    return sentences


def _loss_parameters(study: Study) -> Iterator[str]:
    """Which of the published values the losses have: two very different losses share a name."""
    found = dict.fromkeys(
        _published(beta, group.settings.get("loss.lam"))
        for group in study.groups
        if (beta := group.settings.get("loss.beta")) is not None
    )
    if len(found) > MOST_PARAMETERS:
        yield f"The parameters of the loss have {len(found)} different values: see the columns."
    elif found:
        yield f"Parameters of the loss: {'; '.join(found)}."


def _published(beta: float, lam: float | None) -> str:
    given = {"beta": beta} if lam is None else {"beta": beta, "lam": lam}
    for name, values in PRESETS.items():
        if given.items() <= values.items():
            return f"{_parameters(values)} ({name})"
    return _parameters(given)


def _parameters(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in values.items())


def _training_classes(study: Study) -> Iterator[str]:
    held: dict[float, list[Group]] = {}
    for group in study.groups:
        held.setdefault(group.settings["eval.validation_classes"], []).append(group)
    if len(held) > 1:
        shares = (
            f"{_common_label(groups, study.groups)} on {_share(1 - share)}"
            for share, groups in held.items()
        )
        yield f"Not all runs train on the same classes: {'; '.join(shares)}."


def _share(share: float) -> str:
    return "all of them" if share == 1 else f"{100 * share:.4g}%"


def _common_label(groups: Sequence[Group], among: Sequence[Group]) -> str:
    """The parts that only their labels have in common: `slow` for bs20-slow and bs40-slow."""
    parts = [label.split("-") for label in (group.label for group in groups)]
    others = {part for group in among if group not in groups for part in group.label.split("-")}
    common = [part for part in parts[0] if all(part in p for p in parts) and part not in others]
    return "-".join(common) or ", ".join(group.label for group in groups)


def _patience(study: Study) -> Iterator[str]:
    """How many runs stopped by patience; a run that reached its length limit has not converged."""
    finished = [run for group in study.groups for run in group.finished]
    patient = [run for run in finished if run.settings["eval.patience"] and run.planned]
    limit = sum(run.number("trained_steps") == run.planned for run in patient)
    if patient:
        text = f"Of {len(patient)} finished runs with patience, {limit} ended at the length limit"
        yield f"{text}, {len(patient) - limit} by patience."


def describe_missing(run: Run) -> str:
    return f"{run.name}: {run.state}" + (f", {run.note}" if run.note else "")


def markdown(
    studies: Sequence[Study],
    tables: Sequence[Table],
    searches: Mapping[str, Comparison],
    against: str | None = None,
) -> str:
    """searches: study -> the state of its search. against: see launch/paired.py."""
    parts = []
    for study in studies:
        found = table_cells(study, tables)
        parts += [f"## {study.name}", " ".join(remarks(study, tables))]
        if found.rows:
            parts.append(_table(found.header, found.rows))
        for each in sections(study, tables, searches, against):
            parts += [f"### {each.title}", _table(each.header, each.rows)]
        if study.without_result():
            items = "\n".join(f"- {describe_missing(run)}" for run in study.without_result())
            parts.append(f"Without a result:\n\n{items}")
    return "\n\n".join(parts) + "\n"


def sections(
    study: Study,
    tables: Sequence[Table],
    searches: Mapping[str, Comparison],
    against: str | None,
) -> Iterator[Comparison]:
    """The tables below that of a study."""
    difference = paired(study, against)
    if difference:
        yield difference
    if study.name in searches:
        yield searches[study.name]
    yield from comparisons(study, tables)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def as_csv(studies: Sequence[Study], tables: Sequence[Table]) -> str:
    """A line per run, with fractions in all digits, and the paper's Recall@1 on the same dataset."""
    runs = [run for study in studies for run in study.runs]
    keys = list(dict.fromkeys(key for study in studies for key in study.varying))
    amounts = ("images", "step", "trained_steps", "steps_without_pairs", "seconds", "world_size")
    scores = [*score_names(runs), *amounts]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    fixed = ["study", "run", "state", "note", "dataset", "seed"]
    writer.writerow([*fixed, *keys, *scores, "images_per_second", "paper recall@1", "paper table"])
    for study in studies:
        papers = tables_for(study, tables)
        for run in study.runs:
            score = paper_score(run.settings, papers)
            dataset = run.settings.get("data.dataset", "")
            writer.writerow(
                [
                    *(study.name, run.name, run.state, run.note, dataset, run.seed),
                    *(run.settings.get(key, "") for key in keys),
                    *("" if (x := run.number(key)) is None else x for key in scores),
                    *(
                        "" if run.images_per_second is None else run.images_per_second,
                        round(score.recall / 100, 4) if score else "",
                        score.table.table if score else "",
                    ),
                ]
            )
    return text.getvalue()


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def title_of(key: str) -> str:
    return key.replace("recall@", "Recall@").replace("_", " ")


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _count(group: Group) -> str:
    finished = len(group.finished)
    return str(finished) if finished == group.seeds else f"{finished} of {group.seeds}"


def _percent(spread: Spread | None, *, whole: bool = False) -> str:
    if spread is None:
        return ""
    low, mean, high = (f"{100 * x:.2f}" for x in (spread.low, spread.mean, spread.high))
    return f"{mean} ± {100 * spread.error:.2f} ({low} to {high})" if whole and low != high else mean


def _number(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.mean:,.0f}"


def _paper_title(study: Study, table: Table) -> str:
    ks = "/".join(key.removeprefix("recall@") for key in _printed(study.datasets, table))
    where = "" if table.dataset in study.datasets else f" on {table.dataset}"
    return f"paper{where}, Recall@{ks} ({table.table})"


def _paper_score(group: Group, table: Table) -> str:
    row = table.row_for(group.settings)
    keys = _printed({group.settings["data.dataset"]}, table)
    return "/".join(f"{row.recall[key]:.{table.digits}f}" for key in keys) if row else ""


def _printed(datasets: set[str], table: Table) -> list[str]:
    """The scores to print: all of a table on the same dataset, Recall@1 of the others."""
    return list(table.rows[0].recall) if table.dataset in datasets else ["recall@1"]
