"""Oracles: run folders written by hand, with numbers that are easy to average; the tables of the
paper as tests/test_configs.py has them."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import test_configs

from dml.config import load, to_yaml
from dml.run_folder.folder import differences, folder_of
from launch.halving import stages
from launch.page import _without_value
from launch.paper import read_tables, tables_for
from launch.plots import Point, Series, chart
from launch.records import FINISHED, Run, learning_settings, read_studies, settings_of
from launch.report import main
from launch.sweep import read_sweep
from launch.tables import remarks

ROOT = Path(__file__).parents[1]
SOP = ROOT / "configs" / "sop.yaml"
RESULT = {
    "recall@1": 0.5,
    "recall@10": 0.6,
    "map@r": 0.25,
    "step": 40,
    "images": 800,
    "steps_without_pairs": 0.25,
    "validation_recall@1": None,
    "untrained": None,
    "seed": 0,
    "seconds": 1800.0,
    "world_size": 1,
}


@pytest.fixture
def runs(tmp_path):
    """Writes a run's folder into the study `sop_batch_size`; returns the folder of all runs."""
    root = tmp_path / "runs"

    def write(name, sets=(), result=RESULT, metrics=(), config=SOP, **files):
        folder = root / "sop_batch_size" / name
        folder.mkdir(parents=True)
        found = load(config, [f"run.name={name}", f"run.dir={folder.parent}", *sets])
        (folder / "config.yaml").write_text(to_yaml(found))
        if result:
            (folder / "result.json").write_text(json.dumps(result))
        lines = "".join(json.dumps(line) + "\n" for line in metrics)
        (folder / "metrics.jsonl").write_text(lines)
        for file, content in files.items():
            (folder / file.replace("_", ".")).write_text(content)
        return root

    return write


@pytest.fixture
def report(tmp_path):
    def make(root, *options):
        assert main([str(root), "--out", str(tmp_path / "out"), *options]) == 0
        out = tmp_path / "out"
        html, table = (out / "report.html").read_text(), (out / "report.md").read_text()
        with (out / "runs.csv").open() as file:
            return html, table, list(csv.DictReader(file))

    return make


def row_of(table: str, label: str) -> dict[str, str]:
    first, _, _ = table.partition("\n### ")
    lines = [[c.strip() for c in x.strip("|").split("|")] for x in first.splitlines() if "|" in x]
    (row,) = [line for line in lines if line[0] == label]
    return dict(zip(lines[0], row, strict=True))


def test_seeds_are_averaged_beside_the_paper(runs, report):
    runs("bs20-seed0", ["batch.classes=4"])
    runs("bs20-seed1", ["batch.classes=4", "run.seed=1"], {**RESULT, "recall@1": 0.6})
    root = runs("bs1000-seed0", ["batch.classes=200", "run.seed=0"])
    html, table, lines = report(root)
    row = row_of(table, "bs20")
    assert (row["batch.size"], row["n"]) == ("20", "2")
    assert row["Recall@1"] == "55.00 ± 5.00 (50.00 to 60.00)"
    assert row["Recall@10"] == "60.00"
    assert row["steps without pairs"] == "25.00"
    assert row["paper, Recall@1 (Supplement, Table 2)"] == "71.40"
    assert row_of(table, "bs1000")["paper, Recall@1 (Supplement, Table 2)"] == "78.35"
    assert "in over 20% of the iterations" in table
    assert "1.50 hours of training" in table
    assert [line["run"] for line in lines] == ["bs1000-seed0", "bs20-seed0", "bs20-seed1"]
    assert (lines[1]["recall@1"], lines[1]["paper recall@1"]) == ("0.5", "0.714")
    assert "Recall@1 by batch size" in html
    assert "Share of steps without informative pairs by batch size" in html


def test_groups_come_in_the_order_of_the_batch_size(runs, report):
    for size in (200, 4, 16):
        root = runs(f"bs{5 * size}-seed0", [f"batch.classes={size}"])
    _, table, _ = report(root)
    first, _, _ = table.partition("\n### ")
    assert re.findall(r"^\| (bs\d+)", first, re.MULTILINE) == ["bs20", "bs80", "bs1000"]


def test_the_order_is_not_that_of_what_follows(runs):
    for size, every in ((4, 800), (8, 400)):
        for label, held in (("a", 0), ("b", 0.1)):
            sets = [f"batch.classes={size}", f"eval.every_steps={every}"]
            root = runs(f"bs{5 * size}-{label}", [*sets, f"eval.validation_classes={held}"])
    (study,) = read_studies(root)
    assert [group.label for group in study.groups] == ["bs20-a", "bs40-a", "bs20-b", "bs40-b"]


def test_columns_are_what_differs_and_does_not_follow(runs, report):
    for size, lr in ((4, 1e-5), (8, 1e-5), (8, 2e-5)):
        runs(
            f"{size}-{lr}", [f"batch.classes={size}", f"optim.lr={lr}", f"eval.every_steps={size}"]
        )
    root = runs("long", ["batch.classes=8", "optim.lr=2e-5", "length.steps=50", "engine.tile=8"])
    (study,) = read_studies(root)
    assert study.varying == ("batch.size", "optim.lr", "length.steps", "length.images")
    assert study.columns == ("batch.size", "optim.lr", "length.steps")
    assert "These settings change with the columns shown: length.images." in report(root)[1]


def test_what_has_no_result_is_named(runs, report):
    step = {"step": 30, "loss": 1.0}
    runs("bs20-seed0", ["batch.classes=4"])
    seed1, seed2 = (["batch.classes=4", f"run.seed={seed}"] for seed in (1, 2))
    runs("bs20-seed1", seed1, None, [step], plan_json='{"steps": 90}')
    failed = json.dumps({"reason": "no <shards>", "log": ["line 1", "ShardError: <gone>"]})
    runs("bs20-seed2", seed2, None, failed_json=failed)
    root = runs("bs40-seed0", config_yaml="nonsense: 3\n")
    (root / "sop_batch_size" / "bs40-seed1").mkdir()
    (root / "sop_batch_size" / "bs40-seed1" / "failed.json").write_text('{"reason": "bad config"}')
    html, table, lines = report(root, "--sweep", str(ROOT / "configs/sweeps/sop_batch_size.yaml"))
    assert "- bs20-seed1: unfinished, last seen at step 30 of 90\n" in table
    assert "- bs20-seed2: failed, no <shards>; last seen at step 0\n" in table
    assert "- bs40-seed0: failed, config.yaml: nonsense" in table
    assert "- bs40-seed1: failed, bad config\n" in table
    assert "- bs640-seed2: never started\n" in table
    assert "1 finished, 1 unfinished, 3 failed, 16 never started." in table
    assert row_of(table, "bs20")["n"] == "1 of 3"
    assert "ShardError: &lt;gone&gt;" in html
    assert len(lines) == 21
    assert {line["state"] for line in lines if line["run"] == "bs640-seed2"} == {"never started"}


def test_runs_that_slurm_never_started_are_named_and_counted(runs, report):
    root = runs("bs20-seed0", ["batch.classes=4"])
    names = ["bs20-seed0", "bs20-seed1"], ["bs20-seed1", "bs20-seed2", "bs40-seed0"]
    content = {"submissions": [{"name": "x", "runs": each, "job": None} for each in names]}
    (root / "sop_batch_size" / "sweep.json").write_text(json.dumps(content))
    for folder in (root, root / "sop_batch_size", root.parent):
        _, table, _ = report(folder)
        assert row_of(table, "bs20")["n"] == "1 of 3"
        assert "1 finished, 3 never started." in table
        assert "- bs40-seed0: never started\n" in table
    sweep = str(ROOT / "configs/sweeps/sop_batch_size.yaml")
    assert "1 finished, 20 never started." in report(root.parent, "--sweep", sweep)[1]


def test_the_same_seed_again_is_no_other_seed(runs, report):
    runs("bs20-seed0")
    runs("bs20-seed0-copy", result={**RESULT, "recall@1": 0.9})
    runs("bs20-seed1", ["run.seed=1"], {**RESULT, "recall@1": 0.6})
    root = runs("other", ["run.seed=2", "optim.weight_decay=0"])
    html, table, _ = report(root)
    row = row_of(table, "bs20, bs20-seed0-copy")
    assert (row["n"], row["Recall@1"]) == ("2", "55.00 ± 5.00 (50.00 to 60.00)")
    assert row_of(table, "other")["optim.weight_decay"] == "0.0"
    for text in (html, table):
        assert "because another run has their settings and seed: bs20-seed0-copy." in text


@pytest.mark.parametrize("other", ["engine.kind=streaming", "data.shards=elsewhere"])
def test_seeds_carried_out_in_another_way_are_one_row(runs, report, other):
    runs("bs20-seed0")
    root = runs("bs20-seed1", ["run.seed=1", other], {**RESULT, "recall@1": 0.6})
    row = row_of(report(root)[1], "bs20")
    assert (row["n"], row["Recall@1"]) == ("2", "55.00 ± 5.00 (50.00 to 60.00)")
    assert other.partition("=")[0] not in row


def test_a_report_ignores_exactly_what_a_resume_may_change_and_what_is_listed_here():
    """Both are tried out on every key of a config, so neither can drift from the other."""
    config = load(SOP)
    another = object()  # equal to no value

    def learned(found):
        return learning_settings(Run("study", "run", FINISHED, settings_of(found), {}))

    resumable, ignored = set(), set()
    for name, section in vars(config).items():
        for key in vars(section):
            # lists and products are changed with values that fit
            if name == "loss" or key in ("classes", "per_class"):
                sets = {"name": "loss.name=nca", "pairs": "loss.beta=45"}
                changed = load(SOP, [sets.get(key, f"batch.{key}=7")])
            else:
                changed = replace(config, **{name: replace(section, **{key: another})})
            if not differences(config, changed):
                resumable.add(f"{name}.{key}")
            if learned(config) == learned(changed):
                ignored.add(f"{name}.{key}")
    assert {"engine.kind", "data.shards", "run.dir"} <= resumable
    measured = {"run.log_steps", "eval.ks", "eval.every_steps", "eval.untrained"}
    longer = {"length.steps", "length.epochs", "length.images"}  # a constant rate allows it
    assert resumable - ignored == longer
    assert ignored - resumable == {"run.name", "run.seed"} | measured


def test_a_damaged_file_is_named(runs, report, capsys):
    root = runs("bs20-seed0", result_json="{")
    runs("bs40-seed0", ["batch.classes=8"], None, failed_json="[]")
    runs("bs80-seed0", ["batch.classes=16"])
    _, table, _ = report(root)
    for name, file in (("bs20-seed0", "result.json"), ("bs40-seed0", "failed.json")):
        path = root.resolve() / "sop_batch_size" / name / file
        assert f"- {name}: damaged, {path} is damaged: it does not hold a JSON object" in table
    assert row_of(table, "bs80")["n"] == "1"
    (root / "sop_batch_size" / "sweep.json").write_text("{}")
    assert main([str(root), "--out", "unused"]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


def test_folders_of_one_name_are_studies_apart(runs):
    root = runs("bs20-seed0")
    (root / "old").mkdir()
    shutil.copytree(root / "sop_batch_size", root / "old" / "sop_batch_size")
    found = {study.name: len(study.runs) for study in read_studies(root)}
    assert found == {"old/sop_batch_size": 1, "sop_batch_size": 1}
    (study,) = read_studies(root / "sop_batch_size")
    assert study.name == "sop_batch_size"


def test_evaluations_on_the_way_count_where_they_choose(runs):
    for every in (10, 20):
        for held in (0, 0.1):
            sets = [f"eval.every_steps={every}", f"eval.validation_classes={held}"]
            root = runs(f"{every}-{held}", sets)
    (study,) = read_studies(root)
    assert [group.label for group in study.groups] == ["10-0, 20-0", "10-0.1", "20-0.1"]


def test_the_length_limit_is_told_from_patience(runs, report):
    held = ["eval.every_steps=10", "eval.validation_classes=0.1", "eval.patience=2"]
    plan = '{"steps": 90}'
    runs("a-slow-seed0", held, {**RESULT, "trained_steps": 60}, plan_json=plan)
    old = [{"step": 90, "split": "validation", "recall@1": 0.5}]  # without trained_steps
    runs("a-slow-seed1", [*held, "run.seed=1"], metrics=old, plan_json=plan)
    runs("b-slow-seed0", [*held, "batch.classes=4"], metrics=old, plan_json=plan)
    root = runs("a-fast-seed0", plan_json=plan)
    html, table, lines = report(root)
    row = row_of(table, "a-slow")
    assert (row["steps"], row["trained steps"]) == ("40", "75")
    assert [line["trained_steps"] for line in lines] == ["40", "60", "90", "90"]
    for text in (html, table):
        assert (
            "Of 3 finished runs with patience, 2 ended at the length limit, 1 by patience." in text
        )
        assert "same classes: fast on all of them; slow on 90%." in text


def test_a_failure_that_was_made_good_is_none(runs, report):
    root = runs("bs20-seed0", failed_json='{"reason": "bad"}')
    assert "bad" not in report(root)[1]


def test_curves_are_means_over_seeds_against_images_and_steps(runs, report):
    def seen(recall):
        on_the_way = [{"step": t, "split": "test", "recall@1": t * recall} for t in (10, 20)]
        return [{"step": 10, "images": 200, "loss": 1.0}, *on_the_way]

    runs("bs20-seed0", ["batch.classes=4"], metrics=[*seen(0.01), {"step": 30, "split": "test"}])
    runs("bs20-seed2", ["batch.classes=4", "run.seed=2"], None, metrics=seen(0.09)[:-1])
    root = runs("bs20-seed1", ["batch.classes=4", "run.seed=1"], metrics=seen(0.03))
    half_a_line = root / "sop_batch_size" / "bs20-seed1" / "metrics.jsonl"
    half_a_line.write_text(half_a_line.read_text() + '{"step": 4')
    html, _, _ = report(root)
    assert "against images seen" in html
    assert "against steps" in html
    tips = re.findall(r"<title>(bs20, step .*?)</title>", html)
    # the standard error of 0.1 and 0.3 is 0.1, that of 0.2 and 0.6 is 0.2
    ten, twenty = (
        "step 10, 200 images: 20% ± 10.00, n = 2",
        "step 20, 400 images: 40% ± 20.00, n = 2",
    )
    assert tips == 2 * [f"bs20, {ten}", f"bs20, {twenty}"]
    assert "it ends where the first of them stops" in html


def test_an_evaluation_before_the_first_step_has_no_place_on_a_logarithm(runs, report):
    seen = [{"step": t, "split": "test", "recall@1": 0.01 * t} for t in (0, 10, 20)]
    html, _, _ = report(runs("one", metrics=seen))
    assert [len(re.findall("<circle", svg)) for svg in html.split("<figure>")[1:]] == [3, 2]


def test_another_dataset_shows_the_trend_and_says_so(runs, report):
    for size in (4, 8):
        sets = [f"batch.classes={size}"]
        root = runs(f"bs{5 * size}-seed0", sets, config=ROOT / "configs" / "icons.yaml")
    html, table, lines = report(root)
    row = row_of(table, "bs20")
    assert row["paper on sop, Recall@1 (Supplement, Table 2)"] == "71.40"
    assert row["paper on cub200, Recall@1 (Supplement, Table 1)"] == "64.75"
    assert "on other datasets (cub200, sop): compare the trend, not the values." in table
    assert "The paper&#x27;s Recall@1 by batch size, of other datasets" in html
    assert {line["paper recall@1"] for line in lines} == {""}


def test_the_ablation_beside_table_2(runs, report):
    for run in read_sweep(ROOT / "configs" / "sweeps" / "cars196_ablation.yaml").runs:
        root = runs(run.name, run.sets, config=run.files)
    _, table, _ = report(root)
    for row, (_, _, recall) in test_configs.ABLATION.items():
        found = row_of(table, row)
        assert found["paper, Recall@1/2/4/8 (Table 2)"].startswith(f"{recall}/")
        assert found["n"] == "3"


@pytest.mark.parametrize(("name", "recall"), test_configs.BASES.items())
def test_a_single_run_stands_beside_the_table_of_its_dataset(runs, report, name, recall):
    root = runs("one", config=ROOT / "configs" / f"{name}.yaml")
    row = row_of(report(root)[1], "one")
    assert any("paper" in key and value.startswith(f"{recall}/") for key, value in row.items())


def test_a_study_of_the_learning_rate_stands_beside_the_table_of_its_dataset(runs, report):
    for lr in (1e-5, 1e-4):
        root = runs(f"lr{lr}", [f"optim.lr={lr}"])
    _, table, _ = report(root)
    score = row_of(table, "lr0.0001")["paper, Recall@1/10/100/1000 (Table 5)"]
    assert score == "78.2/90.5/96.0/98.7"


@pytest.mark.parametrize("name", ["sop", "cub200", "cars196", "inshop"])
def test_every_report_shows_the_systems_that_the_paper_compares_with(runs, report, name):
    """Also a study of the batch size, which stands beside another table; ours come first."""
    sets = ["batch.classes=4"], ["batch.classes=8", "model.backbone=resnet50"]
    for label, given in zip(("bs20-seed0", "bs40-seed0"), sets, strict=True):
        root = runs(label, given, config=ROOT / "configs" / f"{name}.yaml")
    html, text, _ = report(root)
    _, _, after = text.partition("### The systems of Table ")
    lines = [line.strip("| ").split(" | ") for line in after.splitlines() if line[:1] == "|"]
    assert lines[0][:4] == ["system", "dimensions", "backbone", "Recall@1"]
    assert lines[2][:4] == ["ours: bs20", "512", "BN-Inception", "50.0"]
    assert lines[3][:4] == ["ours: bs40", "512", "ResNet-50", "50.0"]
    found = {line[0]: (int(line[1]), float(line[3])) for line in lines[2:] if line[1].isdigit()}
    assert found.items() >= test_configs.OTHERS[name].items()
    assert found["MS, the paper"] == (512, float(test_configs.BASES[name]))
    assert "as published</h3>" in html
    assert html.count("<td>ABE (ensemble)</td>") == 1


def test_what_others_measured_of_ms_is_marked_as_such(runs, report):
    """Musgrave et al. 2020 on Cars-196: precision@1 and MAP@R."""
    html, text, _ = report(runs("one", config=ROOT / "configs" / "cars196.yaml"))
    assert "MS on cars196 as measured by others, neither its authors nor us" in text
    row = "| MS with its miner | 4 x 128 | BN-Inception | 83.7 | 27.0 | Reality Check |"
    assert row in text
    assert "| MS | 512 | BN-Inception | 78.4 |  | research-ms-loss#6" in text
    assert "<td>MS with its miner</td><td>4 x 128</td>" in html


def test_icons_have_no_published_systems(runs, report):
    html, text, _ = report(runs("one", config=ROOT / "configs" / "icons.yaml"))
    for made in (html, text):
        assert "as published" not in made
        assert "by others" not in made


@pytest.mark.parametrize(
    ("dataset", "sizes"), [("sop", test_configs.SOP), ("cub200", test_configs.CUB)]
)
def test_the_supplement_is_that_of_the_configs(dataset, sizes):
    (table,) = [t for t in read_tables() if (t.dataset, t.by) == (dataset, "batch.size")]
    found = {row.where["batch.size"]: f"{row.recall['recall@1']:.2f}" for row in table.rows}
    assert found == sizes


@pytest.mark.parametrize("name", test_configs.PAPER)
def test_the_scores_in_the_headers_of_the_configs_are_those_of_the_tables(name, runs):
    """A config's header and the table that its settings find say the same."""
    (study,) = read_studies(runs("one", config=test_configs.path(name)))
    header = " ".join(test_configs.header(name))
    found = {float(x) for x in re.findall(r"Recall@1 (\d+\.\d\d?)", header)}
    tables = tables_for(study, read_tables())
    scores = {table.row_for(study.groups[0].settings).recall["recall@1"] for table in tables}
    assert found
    assert found <= scores


def test_the_same_runs_give_the_same_page_that_needs_nothing_else(runs, report):
    runs("bs20-seed0", ["batch.classes=4"])
    root = runs("bs40-seed0", ["batch.classes=8"])
    html, *_ = first = report(root)
    assert report(root) == first
    assert "http" not in html
    assert html.count("<script") == 1
    assert not re.search(r"<script[^>]+src|@import|url\(", html)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert figures
    for figure in figures:
        ET.fromstring(figure)


def test_a_chart_of_one_value_or_of_none():
    assert chart("t", "x", []) == ""
    for y in (0.0, 0.5):
        svg = chart("a < b", "x", [Series("s", (Point(20, y, y, y, "tip"),))], log_x=True)
        assert "a &lt; b" in svg
        assert "nan" not in svg


@pytest.mark.parametrize(
    ("label", "x", "left"),
    [
        ("bs320-scaled-equal_images", 320, "scaled-equal_images"),
        ("bs20-equal_images", 20, "equal_images"),
        ("dim64", 64, "ours"),
        ("bs3200-x", 320, "bs3200-x"),
    ],
)
def test_what_is_left_of_a_label(label, x, left):
    assert _without_value(label, x) == left


@pytest.mark.parametrize(("made", "sentence"), [(False, "is not a folder"), (True, "has no runs")])
def test_nothing_to_report(tmp_path, capsys, made, sentence):
    root = tmp_path / "runs"
    if made:
        root.mkdir()
    assert main([str(root), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.count("\n") == 1
    assert not out
    assert not (tmp_path / "out").exists()


def test_nowhere_to_write(runs, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([str(runs("one")), "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err


def test_a_bad_sweep(runs, capsys):
    assert main([str(runs("one")), "--out", "unused", "--sweep", "/absent.yaml"]) == 2
    assert "/absent.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([[]], "beta 40, lam 0.5 (the authors' code)"),
        ([["loss.beta=50", "loss.lam=1"]], "beta 50, lam 1 (the paper's text)"),
        ([["loss.name=lifted_structure_star"], []], "beta 40, lam 0.5 (the authors' code)"),
        ([["loss.lam=1"]], "beta 40, lam 1"),
        (
            [["loss.beta=50", "loss.lam=1"], []],
            "beta 40, lam 0.5 (the authors' code); beta 50, lam 1 (the paper's text)",
        ),
    ],
)
def test_a_report_names_the_parameters_of_the_loss(runs, sets, said):
    for n, more in enumerate(sets):
        root = runs(f"run{n}-seed0", more)
    (study,) = read_studies(root)
    assert f"Parameters of the loss: {said}." in remarks(study, read_tables())


def test_a_loss_without_such_parameters_is_named_by_its_column_alone(runs):
    (study,) = read_studies(runs("a-seed0", ["loss.name=triplet"]))
    assert not any("Parameters" in sentence for sentence in remarks(study, read_tables()))


def test_a_run_that_is_being_trained_longer_has_no_result_yet(runs, report):
    longer = {**RESULT, "planned_steps": 40}
    root = runs("a-seed0", ["length.steps=60"], longer, plan_json='{"steps": 60}')
    runs("b-seed0", ["length.steps=40"], longer, plan_json='{"steps": 40}')
    table = report(root)[1]
    assert "- a-seed0: unfinished, last seen at step 0 of 60\n" in table
    assert "1 unfinished, 1 finished." in table


# ---- comparisons, maps, lists -----------------------------------------------------------------------


def scored(recall, **more):
    return {**RESULT, "recall@1": recall, **more}


def test_differences_are_paired_by_seed(runs, report):
    """Scores vary by ten points from seed to seed, differences by two."""
    scores = {
        "a": {0: 0.50, 1: 0.60, 2: 0.70},
        "b": {0: 0.47, 1: 0.56, 2: 0.65, 3: 0.9},
        "c": {5: 0.1},
    }
    for size, (label, found) in zip((16, 8, 4), scores.items(), strict=True):
        for seed, recall in found.items():
            sets = [f"batch.classes={size}", f"run.seed={seed}"]
            root = runs(f"{label}-seed{seed}", sets, scored(recall))
    html, table, _ = report(root, "--against", "a")
    _, _, after = table.partition(
        "### Recall@1 minus that of a, seed by seed, in percent points\n\n"
    )
    rows = [line.strip("| ").split(" | ") for line in after.splitlines() if line[:1] == "|"]
    # -3, -4, -5: the mean is -4, s is 1, the standard error 1 / sqrt(3)
    assert rows[2] == ["b", "3", "-4.00", "0.58", "-3.00, -4.00, -5.00"]
    assert rows[3][0] != "c"  # it shares no seed
    assert "minus that of a, seed by seed" in html
    assert "minus that of b, seed by seed" in report(root)[1]  # by default the best mean
    shutil.rmtree(root / "sop_batch_size" / "a-seed1")
    shutil.rmtree(root / "sop_batch_size" / "a-seed2")
    assert "seed by seed" not in report(root)[1]  # a single difference has no spread


def test_against_a_row_that_is_not_there(runs, capsys):
    root = runs("bs20-seed0", ["batch.classes=4"])
    assert main([str(root), "--out", "unused", "--against", "bs40"]) == 2
    assert "--against bs40: no such row; the rows are bs20" in capsys.readouterr().err


def test_a_study_on_held_out_classes_says_so_and_stands_beside_no_table(runs, report):
    held = ["eval.every_steps=10", "eval.validation_classes=0.2", "eval.test=false"]
    found = {"step": 40, "validation_recall@1": 0.5, "seconds": 1.0}
    for size in (4, 8):
        for seed in (0, 1):
            sets = [f"batch.classes={size}", f"run.seed={seed}", *held]
            root = runs(
                f"bs{5 * size}-seed{seed}", sets, {**found, "validation_recall@1": size / 10}
            )
    html, table, _ = report(root)
    row = row_of(table, "bs40")
    assert row["validation Recall@1"] == "80.00"
    assert not [key for key in row if "paper" in key]
    assert "as published" not in table
    assert "Recall@1 of held-out classes minus that of bs40" in table
    assert "validation Recall@1 by batch size" in html


def test_a_map_of_two_settings_marks_what_was_published(runs, report):
    """beta 40 with lam 0.5, and beta 50 with lam 1, which lies between two columns."""
    for beta in (10, 40, 60):
        for lam in (0.25, 0.5, 1.0):
            root = runs(
                f"beta{beta}-lam{lam}-seed0",
                [f"loss.beta={beta}", f"loss.lam={lam}"],
                scored(0.75 - abs(lam - 0.5) - abs(beta - 40) / 1000),
            )
    html, _, _ = report(root)
    figure = next(x for x in re.findall(r"<figure>.*?</figure>", html, re.DOTALL) if "<rect" in x)
    assert "Recall@1 by loss.beta and loss.lam" in figure
    tree = ET.fromstring(figure)
    cells = {rect.get("data-row"): rect for rect in tree.iter("rect")}
    assert len(cells) == 9
    assert "40.0,0.5,0.75,0.0,1" in cells
    names = ["".join(span.itertext()) for span in tree.iter("span")]
    assert names == ["a the authors' code", "b the paper's text", "c the best of this map"]
    authors, paper, best = (
        (float(mark.get("cx")), float(mark.get("cy")))
        for mark in tree.iter("circle")
        if mark.get("class") == "mark"
    )

    def middle(key):
        rect = cells[key]
        return [
            float(rect.get(x)) + float(rect.get(size)) / 2
            for x, size in (("x", "width"), ("y", "height"))
        ]

    assert authors[1] == best[1] == pytest.approx(middle("40.0,0.5,0.75,0.0,1")[1] - 8, abs=0.1)
    between = [middle(key)[0] for key in cells if key.startswith(("40.0,1.0", "60.0,1.0"))]
    assert between[0] - 30 < paper[0] < between[1]
    assert paper[1] < authors[1]


def test_a_map_shows_the_best_of_several_rates(runs, report):
    for rate, gain in (("1e-3", 0.0), ("1e-2", 0.1)):
        for beta in (10, 40):
            for lam in (0.5, 1.0):
                root = runs(
                    f"beta{beta}-lam{lam}-lr{rate}-seed0",
                    [f"loss.beta={beta}", f"loss.lam={lam}", f"optim.lr={rate}"],
                    scored(0.5 + gain * (1 if lam == 1 else -1)),
                )
    html, _, _ = report(root)
    figure = next(x for x in re.findall(r"<figure>.*?</figure>", html, re.DOTALL) if "<rect" in x)
    assert "by loss.beta and loss.lam, at the best of several optim.lr" in figure
    cells = [rect.get("data-row") for rect in ET.fromstring(figure).iter("rect")]
    assert sorted(cells) == [
        f"{beta}.0,{row},0.0,1" for beta in (10, 40) for row in ("0.5,0.5", "1.0,0.6")
    ]


def test_names_are_no_numbers_for_a_map(runs, report):
    for name in ("nca", "triplet"):
        for size in (4, 8):
            sets = [f"loss.name={name}", f"batch.classes={size}"]
            root = runs(f"{name}-bs{5 * size}-seed0", sets)
    assert "<rect" not in report(root)[0].partition("<script")[0]


def test_rows_that_differ_in_a_name_are_drawn_one_below_the_other(runs, report):
    """The best first; a dot at its score, a bar from mean - error to mean + error; the frozen features
    as a line, with one row on its left."""
    scores = {
        "nca": (0.25, 0.5),
        "<triplet>": (0.5, 0.5),
        "a name of more than thirty letters": (0.125,),
    }
    for name, found in scores.items():
        loss = "nca" if name == "nca" else "triplet" if len(found) > 1 else "contrastive"
        for seed, score in enumerate(found):
            result = scored(score, frozen=frozen_at(0.25))
            root = runs(f"{name}-seed{seed}", [f"loss.name={loss}", f"run.seed={seed}"], result)
    html, _, _ = report(root)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    (drawn,) = [ET.fromstring(each) for each in figures if "Recall@1 of every row" in each]
    dots = list(drawn.iter("circle"))
    assert [dot.get("data-row") for dot in dots] == [
        *("<triplet>,0.5,0.0,2", "nca,0.375,0.125,2"),
        "a name of more than thirty letters,0.125,0.0,1",
    ]
    assert [dot.find("title").text for dot in dots] == [
        *("<triplet>: 50% ± 0.00, n = 2", "nca: 37.5% ± 12.50, n = 2"),
        "a name of more than thirty letters: 12.5%, n = 1",
    ]
    texts = [text.text for text in drawn.iter("text")]
    assert "a name of more than thirty le…" in texts
    best, middle, last = (float(dot.get("cx")) for dot in dots)
    percent = (best - last) / 37.5
    assert middle == pytest.approx(last + 25 * percent, abs=0.2)
    (bar,) = [line for line in drawn.iter("line") if line.get("class") is None]
    ends = [float(bar.get(key)) for key in ("x1", "x2")]
    assert ends == pytest.approx([middle - 12.5 * percent, middle + 12.5 * percent], abs=0.2)
    (frozen,) = [line.get("points") for line in drawn.iter("polyline")]
    xs = [float(point.split(",")[0]) for point in frozen.split()]
    assert xs == pytest.approx([last + 12.5 * percent] * 2, abs=0.2)
    ticks = {
        text: float(each.get("x")) for each in drawn.iter("text") if (text := each.text)[-1] == "%"
    }
    assert ticks["50%"] - ticks["10%"] == pytest.approx(40 * percent, abs=0.2)


def test_rows_that_differ_in_numbers_are_not_drawn_as_names(runs, report):
    for size in (4, 8):
        root = runs(f"bs{5 * size}-seed0", [f"batch.classes={size}"])
    assert "of every row" not in report(root)[0]


def test_the_list_of_runs_links_their_folders(runs, report, tmp_path):
    runs("bs20-seed0", ["batch.classes=4"], nearest_png="picture")
    root = runs("bs 40?-seed0", ["batch.classes=8"], None)
    html, _, _ = report(root)
    assert "All runs: 2" in html
    links = re.findall(r'<a href="([^"]*)">([^<]*)</a>', html)
    assert [text for _, text in links] == [
        *("bs 40?-seed0", "config.yaml"),
        *("bs20-seed0", "config.yaml", "nearest.png"),
    ]
    assert links[0][0] == "../runs/sop_batch_size/bs%2040%3F-seed0"
    for target, _ in links:
        assert (tmp_path / "out" / unquote(target)).exists()


def test_steps_without_pairs_are_drawn_as_a_curve(runs, report):
    """At most 40 points, however long the run was."""
    for seed in (0, 1):
        told = [{"step": 10 * t, "steps_without_pairs": t / 400} for t in range(1, 101)]
        root = runs(f"bs20-seed{seed}", ["batch.classes=4", f"run.seed={seed}"], metrics=told)
    html, _, _ = report(root)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    (drawn,) = [ET.fromstring(figure) for figure in figures if "of the steps so far" in figure]
    points = [circle.get("data-row") for circle in drawn.iter("circle")]
    assert len(points) == 34
    assert points[1] == "bs20,800,0.01,0.01,0.01"  # 40 steps of 20 images, of which 1% had no pair


def test_scores_before_training_are_a_column(runs, report):
    root = runs("one", result=scored(0.5, untrained={"recall@1": 0.125}))
    assert row_of(report(root)[1], "one")["untrained Recall@1"] == "12.50"


def frozen_at(recall):
    return {"recall@1": recall, "recall@10": 2 * recall, "map@r": 0.125}


def test_features_without_training_are_the_first_row(runs, report):
    """Every row beats them, so nothing has failed; the figure has them as a line."""
    for size, score in ((4, 0.3), (8, 0.4)):
        for seed in (0, 1):
            sets = [f"batch.classes={size}", f"run.seed={seed}", f"eval.frozen={seed == 0}".lower()]
            found = frozen_at(0.25) if seed == 0 else None
            root = runs(f"bs{5 * size}-seed{seed}", sets, scored(score, frozen=found))
    html, table, lines = report(root)
    first = next(line for line in table.splitlines() if line.startswith("| frozen features "))
    assert table.index(first) < table.index("| bs20 |")
    row = row_of(table, "frozen features")
    assert (row["Recall@1"], row["Recall@10"], row["map@r"]) == ("25.00", "50.00", "12.50")
    assert (row["n"], row["batch.size"], row["images"]) == ("", "", "")
    assert row_of(table, "bs20")["n"] == "2", "eval.frozen makes no other row"
    assert "Recall@1 25.00 without any training. Every row beats them, by 5.00 to 15.00" in table
    assert "A failure" not in table
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    drawn = next(figure for figure in figures if "Recall@1 by batch size" in figure)
    assert drawn.count("frozen features: 25%") == 2, "from the smallest batch to the largest"
    assert len(lines) == 4, "it is no run"


def test_a_training_that_does_not_beat_its_features_is_called_a_failure(runs, report):
    for size, score in ((4, 0.2), (8, 0.25), (16, 0.3)):
        found = scored(score, frozen=frozen_at(0.25))
        root = runs(f"bs{5 * size}-seed0", [f"batch.classes={size}"], found)
    _, table, _ = report(root)
    assert "A failure: 2 of 3 rows do not beat them (bs20, bs40)." in table


def test_features_of_other_images_are_other_rows(runs, report):
    """At another size of the crop; and held-out classes are compared with held-out classes."""
    held = ["eval.every_steps=10", "eval.validation_classes=0.2", "eval.test=false"]
    for size, recall in ((80, 0.25), (96, 0.5)):
        found = {"step": 40, "validation_recall@1": 0.375, "frozen": frozen_at(recall)}
        root = runs(f"px{size}-seed0", [f"data.size={size}", *held], found)
    _, table, _ = report(root)
    for size, recall in ((80, "25.00"), (96, "50.00")):
        row = row_of(table, f"frozen features of px{size}")
        assert row["validation Recall@1"] == recall
    assert "Every row beats them, by 12.50 points." in table
    assert "A failure: none of the rows beats them (px96)." in table


# ---- studies in parts -------------------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path):
    """A sweep whose search has ended at one point of two, and the folder of its runs."""
    base = f"base: {SOP}\nseeds: [0, 1]\nset: {{run.dir: {tmp_path / 'runs'}}}\n"
    grid = "grid: {batch: {bs20: {batch.classes: 4}, bs40: {batch.classes: 8}}}\n"
    tune = "tune: {validation_classes: 0.2, grid: {optim.lr: [1e-5, 1e-4]}}\n"
    path = tmp_path / "study.yaml"
    path.write_text(base + grid + tune)
    sweep = read_sweep(path)
    (tries,) = stages(sweep)
    for run, recall in zip(tries.runs[:3], (0.3, 0.4, 0.2), strict=True):
        held = {"step": 40, "planned_steps": run.config.length.steps, "validation_recall@1": recall}
        write_folder(run, held)
    _, final = stages(sweep)
    write_folder(final.runs[0], {**RESULT, "planned_steps": 3000})
    return path


def write_folder(run, result):
    folder = folder_of(run.config)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(run.config))
    (folder / "result.json").write_text(json.dumps(result))


def test_a_search_shows_what_it_chose_and_what_is_missing(tuned, report):
    html, table, _ = report(tuned.parent / "runs", "--sweep", str(tuned))
    for text in (html, table):
        assert "The search, by held-out classes" in text
    assert "| bs20 | 2 | 1 of 1 | 2 of 2 | lr0.0001 40.00% | lr0.0001 |" in table
    assert "| bs40 | 2 | 1 of 1 | 1 of 2 | lr1e-05 20.00% |  |" in table
    assert "- bs20-seed1: never started" in table
    assert "- bs40-seed0: never started" in table
    assert "## study/tune" in table


def test_the_settings_that_a_search_chose_are_columns(tuned, report):
    """Though they follow from the batch size."""
    write_folder(read_sweep(tuned).settings["bs40"][0].final[0], RESULT)
    for root in (tuned.parent / "runs", tuned.parent / "runs" / "study"):
        _, table, _ = report(root)
        rows = {label: row_of(table, label) for label in ("bs20", "bs40")}
        assert rows["bs20"]["optim.lr"] == "0.0001"
        assert rows["bs40"]["optim.lr"] == "1e-05"


def test_the_folder_of_a_study_is_written_again_from_what_there_is(tuned, tmp_path):
    out = tmp_path / "docs" / "studies" / "study"
    command = [str(tuned.parent / "runs"), "--out", str(out), "--sweep", str(tuned), "--study"]
    assert main(command) == 0
    readme = out / "README.md"
    first = readme.read_text()
    assert first.startswith("# study\n\nWhat it asks")
    assert "- bs40-seed0: never started" in first
    assert "## study/tune" not in first
    assert "## study/tune" in (out / "report.md").read_text()
    assert (out / "study.yaml").read_text() == tuned.read_text()
    assert (out / "sop.yaml").read_text() == SOP.read_text()
    page = (out / "report.html").read_text()
    assert "All runs: " in page
    assert "<a href" not in page  # the folders are not part of it
    assert str(tmp_path) not in page
    readme.write_text(first.replace("What it asks, and", "Mine:") + "\nAnd this.\n")
    write_folder(stages(read_sweep(tuned))[1].runs[1], {**RESULT, "planned_steps": 3000})
    assert main(command) == 0
    again = readme.read_text()
    assert "Mine: what came out" in again
    assert again.endswith("\nAnd this.\n")
    assert "- bs20-seed1: never started" not in again
    assert again.count("<!-- written by") == 1
    readme.write_text(again.replace("<!-- end of what it writes -->", ""))
    assert main(command) == 2


def test_a_study_has_one_sweep(tuned, capsys):
    with pytest.raises(SystemExit):
        main([str(tuned.parent / "runs"), "--out", "unused", "--study"])
    assert "--study needs --sweep with one file" in capsys.readouterr().err
