"""Oracles: run folders written by hand, with numbers that are easy to average; the tables of the
paper as tests/test_configs.py has them."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import test_configs

from dml.config import load, to_yaml
from dml.run_folder.folder import differences
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
    lines = [[c.strip() for c in x.strip("|").split("|")] for x in table.splitlines() if "|" in x]
    (row,) = [line for line in lines if line[0] == label]
    return dict(zip(lines[0], row, strict=True))


def test_seeds_are_averaged_beside_the_paper(runs, report):
    runs("bs20-seed0", ["batch.classes=4"])
    runs("bs20-seed1", ["batch.classes=4", "run.seed=1"], {**RESULT, "recall@1": 0.6})
    root = runs("bs1000-seed0", ["batch.classes=200", "run.seed=0"])
    html, table, lines = report(root)
    row = row_of(table, "bs20")
    assert (row["batch.size"], row["n"]) == ("20", "2")
    assert row["Recall@1"] == "55.00 (50.00 to 60.00)"
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
    assert re.findall(r"^\| (bs\d+)", table, re.MULTILINE) == ["bs20", "bs80", "bs1000"]


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
    assert (row["n"], row["Recall@1"]) == ("2", "55.00 (50.00 to 60.00)")
    assert row_of(table, "other")["optim.weight_decay"] == "0.0"
    for text in (html, table):
        assert "because another run has their settings and seed: bs20-seed0-copy." in text


@pytest.mark.parametrize("other", ["engine.kind=streaming", "data.shards=elsewhere"])
def test_seeds_carried_out_in_another_way_are_one_row(runs, report, other):
    runs("bs20-seed0")
    root = runs("bs20-seed1", ["run.seed=1", other], {**RESULT, "recall@1": 0.6})
    row = row_of(report(root)[1], "bs20")
    assert (row["n"], row["Recall@1"]) == ("2", "55.00 (50.00 to 60.00)")
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
    ten, twenty = "step 10, 200 images: 20%, n = 2", "step 20, 400 images: 40%, n = 2"
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
    assert "<script" not in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)


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
