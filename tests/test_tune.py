"""Searches of sweeps. Oracle: successive halving as a loop over a table of made-up scores; runs are
folders written by hand, and once, real ones."""

import json
import math
import os
import shutil
import signal
import time

import pytest
import yaml
from fleet import ROOT, environment
from pictures import few_icons
from runs import lines, result, train
from sweeping import OnThisMachine

from dml.config import load, to_yaml
from dml.errors import ConfigError
from dml.run_folder.folder import folder_of
from dml.train import DIVERGED
from launch.halving import kept, lengths, searches, stages
from launch.slurm import main
from launch.sweep import SweepError, read_sweep
from launch.tune import Search

RATES = [1e-5, 1e-4, 1e-3, 1e-2]
SETTINGS = {
    "data.shards": str(few_icons()),
    "data.workers": 0,
    "data.size": 16,
    "batch.classes": 16,
    "model.embedding_size": 32,
    "length.steps": 18,
    "optim.schedule": "constant",
    "run.log_steps": 1,
    "eval.every_steps": None,
    "eval.untrained": False,
}
TUNE = {
    "grid": {"optim.lr": RATES},
    "validation_classes": 0.2,
    "rungs": 2,
    "factor": 3,
}


@pytest.fixture
def study(tmp_path):
    """Writes a sweep with a search and reads it. tune: changes of its section; None removes a key."""

    def write(*sets, tune=None, settings=None, **tree):
        whole = {
            "base": str(ROOT / "configs" / "icons_mini.yaml"),
            "seeds": [0, 1],
            "set": {**SETTINGS, "run.dir": str(tmp_path / "runs"), **(settings or {})},
            "tune": {k: v for k, v in {**TUNE, **(tune or {})}.items() if v is not None},
            **tree,
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(whole, sort_keys=False))
        return read_sweep(path, sets)

    return write


def write_run(run, scores, planned=None, ended=True, failed=None):
    """A run's folder, trained to its length. scores: of the held-out classes, by step; planned: the
    length that it is being trained for."""
    folder, steps = folder_of(run.config), run.config.length.steps
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(run.config))
    (folder / "plan.json").write_text(json.dumps({"steps": planned or steps}))
    told = [{"step": step, "split": "validation", "recall@1": x} for step, x in scores.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    if failed is not None:
        (folder / "failed.json").write_text(json.dumps({"reason": "bad", "code": failed}))
    elif ended:
        best = max(scores, key=scores.get)
        content = {"step": best, "planned_steps": steps, "validation_recall@1": scores[best]}
        (folder / "result.json").write_text(json.dumps(content))


def names(sweep):
    return [run.name for run in sweep.runs]


def labels(found):
    return [setting.label for setting in found]


# ---- what is tried ----------------------------------------------------------------------------------


def test_every_point_of_the_grid_tries_every_setting(study):
    sweep = study(grid={"batch": {"bs32": {"batch.classes": 16}, "bs16": {"batch.classes": 8}}})
    assert names(sweep) == ["bs32-seed0", "bs32-seed1", "bs16-seed0", "bs16-seed1"]
    assert list(sweep.settings) == ["bs32", "bs16"]
    for point, classes in (("bs32", 16), ("bs16", 8)):
        found = sweep.settings[point]
        assert labels(found) == ["lr1e-05", "lr0.0001", "lr0.001", "lr0.01"]
        for setting, lr in zip(found, RATES, strict=True):
            (tried,) = setting.tried
            assert tried.name == f"{point}-{setting.label}-seed0"
            assert [run.name for run in setting.final] == [f"{point}-seed0", f"{point}-seed1"]
            for run in (tried, *setting.final):
                assert (run.config.optim.lr, run.config.batch.classes) == (lr, classes)
                assert load(run.files, run.sets) == run.config
    assert sweep.runs[0].config.run.dir.endswith("runs/study")
    assert tried.config.run.dir.endswith("runs/study/tune")


def test_a_point_has_axes_of_its_own(study):
    """Losses differ in their parameters, and a point may want other rates."""
    sweep = study(
        grid={
            "loss": {
                "ms": {"loss.name": "multi_similarity", "tune": {"loss.lam": [0.5, 1]}},
                "nca": {"loss.name": "nca", "tune": {"optim.lr": [1e-3, 1e-2], "loss.tau": [0.1]}},
            }
        }
    )
    assert labels(sweep.settings["ms"])[:3] == ["lr1e-05-lam0.5", "lr1e-05-lam1", "lr0.0001-lam0.5"]
    assert labels(sweep.settings["nca"]) == ["lr0.001-tau0.1", "lr0.01-tau0.1"]
    assert sweep.settings["nca"][1].final[0].config.loss.parameters["tau"] == 0.1


def test_random_settings_are_the_same_for_every_point_and_inside_their_ranges(study):
    tune = {
        "grid": {
            "optim.lr": {"from": 1e-5, "to": 1e-2, "log": True},
            "optim.warmup_steps": {"from": 0, "to": 5},
            "loss.lam": [0.5, 1],
        },
        "samples": 40,
    }
    grid = {"batch": {"a": {"batch.classes": 16}, "b": {"batch.classes": 8}}}
    sweep = study(tune=tune, grid=grid)
    assert labels(sweep.settings["a"]) == labels(sweep.settings["b"])
    assert len(set(labels(sweep.settings["a"]))) == 40
    configs = [setting.tried[0].config for setting in sweep.settings["a"]]
    rates = sorted(config.optim.lr for config in configs)
    assert 1e-5 <= rates[0] < 1e-4 < rates[20] < 1e-3 < rates[-1] <= 1e-2
    assert {config.optim.warmup_steps for config in configs} == set(range(6))
    assert {config.loss.parameters["lam"] for config in configs} == {0.5, 1}
    assert labels(study(tune=tune, grid=grid).settings["a"]) == labels(sweep.settings["a"])


def test_some_of_a_grid_at_random(study):
    grid = {"optim.lr": RATES, "loss.lam": [0.25, 0.5, 1], "loss.beta": [10, 40, 50]}
    every = labels(study(tune={"grid": grid}).settings[""])
    some = labels(study(tune={"grid": grid, "samples": 7}).settings[""])
    assert len(every) == 36
    assert len(some) == len(set(some)) == 7
    assert [label for label in every if label in some] == some
    assert some != every[:7]


@pytest.mark.parametrize(
    ("tune", "problem"),
    [
        ({"rung": 2}, "tune.rung = 2: unknown key; did you mean rungs? tune has grid, samples"),
        ({"rungs": 0}, "tune.rungs = 0: must be a whole number, at least 1, at most 10"),
        ({"factor": 1}, "tune.factor = 1: must be a whole number, at least 2"),
        ({"share": 0}, "tune.share = 0: must be a finite number, above 0, at most 1"),
        ({"share": 1.5}, "tune.share = 1.5: must be a finite number, above 0, at most 1"),
        ({"seeds": []}, "tune.seeds = []: must be a list of different whole numbers"),
        ({"validation_classes": None}, "tune.validation_classes: is required; for example"),
        (
            {"validation_classes": 0},
            "tune.validation_classes = 0: must be a finite number, above 0",
        ),
        ({"grid": {}}, "tune.grid = {}: has no axis; for example grid: {optim.lr"),
        ({"grid": 3}, "tune.grid = 3: must be a mapping"),
        ({"grid": {"optim.lr": 3}}, "optim.lr = 3: must be a list or a mapping of points"),
        ({"grid": {"optim.rate": [3]}}, "optim.rate = 3 (--set): unknown key; optim has"),
        ({"samples": 9}, "tune.samples = 9: there are only 4 different settings; ask for fewer"),
        (
            {"grid": {f"optim.{i}": [1, 2, 3] for i in range(60)}},
            "and at most 5,000 can be tried; for example samples: 12",
        ),
        ({"grid": {"optim.lr": {"from": 1, "to": 2}}}, "tune.samples: is required with a range"),
        (
            {"grid": {"optim.lr": {"from": 2, "to": 1}}, "samples": 3},
            "a range of a config key has from, a larger to, and perhaps log: true",
        ),
        (
            {"grid": {"optim.lr": {"from": 0, "to": 1, "log": True}}, "samples": 3},
            "both are above 0",
        ),
        ({"grid": {"optim.lr": {"from": 0, "to": 1, "lin": True}}, "samples": 3}, "has from, a"),
        ({"grid": {"batch": {"from": 0, "to": 1}}, "samples": 3}, "a range of a config key"),
        (
            {"grid": {"optim.warmup_steps": {"from": 1, "to": 3}}, "samples": 4},
            "tune.samples = 4: there are only 3 different settings",
        ),
    ],
)
def test_a_problem(study, tune, problem):
    with pytest.raises(SweepError) as caught:
        study(tune=tune)
    assert problem in str(caught.value)


def test_axes_to_tune_without_a_search(study, tmp_path):
    (tmp_path / "plain.yaml").write_text(
        f"base: {ROOT / 'configs' / 'icons_mini.yaml'}\n"
        "grid: {loss: {nca: {loss.name: nca, tune: {optim.lr: [1]}}}}\n"
    )
    with pytest.raises(SweepError, match="a point has axes to tune; add the section tune"):
        read_sweep(tmp_path / "plain.yaml")


# ---- the test classes -------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [(), ("eval.test=true", "eval.validation_classes=0")])
def test_no_run_of_a_search_may_see_the_test_classes(study, sets):
    """Whatever the base, the sweep and the command say."""
    wanted = {"eval.test": True, "eval.untrained": True, "eval.every_steps": 2}
    sweep = study(*sets, settings=wanted, grid={"model.embedding_size": [16, 32]})
    for found in sweep.settings.values():
        for setting in found:
            for run in setting.tried:
                told = run.config.eval
                assert (told.test, told.untrained, told.validation_classes) == (False, False, 0.2)
            assert all(run.config.eval.test for run in setting.final)
    for run in stages(sweep)[0].runs:
        assert not run.config.eval.test


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (["eval.test=false"], "neither test nor held-out classes would be evaluated"),
        (
            ["eval.test=false", "eval.validation_classes=0.2", "eval.untrained=true"],
            "evaluates the test classes, and eval.test is false",
        ),
    ],
)
def test_a_config_without_test_classes(sets, problem):
    with pytest.raises(ConfigError, match=problem):
        load(ROOT / "configs" / "icons_mini.yaml", ["eval.untrained=false", *sets])


@pytest.mark.training
def test_without_eval_test_a_run_needs_no_test_images(tmp_path):
    """The tar of the test images is noise: a run that reads one of them fails."""
    shards = shutil.copytree(few_icons(), tmp_path / "shards")
    tar = shards / "test-000000.tar"
    size = tar.stat().st_size
    tar.write_bytes(os.urandom(size))
    held = ["optim.schedule=constant", "eval.every_steps=2", "eval.validation_classes=0.2"]
    short = [f"data.shards={shards}", "length.steps=4", *held]
    run = train(1, tmp_path / "blind", *short, "eval.test=false")
    found, told = result(run), lines(run)
    assert {line["split"] for line in told if "split" in line} == {"validation"}
    assert not [key for key in found if key.startswith(("recall", "map", "r_pre"))]
    tried = {line["step"]: line["recall@1"] for line in told if "split" in line}
    assert found["validation_recall@1"] == max(tried.values())
    assert not (run / "nearest.png").exists()
    with pytest.raises(AssertionError, match=r"damaged|checksum"):
        train(1, tmp_path / "seeing", *short)


# ---- halving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "rungs", "factor", "evaluations", "steps", "expected"),
    [
        (1, 1, 3, 1, 100, ((100,), 100)),
        (1, 1, 3, 4, 100, ((100,), 25)),
        (1, 3, 3, 1, 900, ((100, 300, 900), 100)),
        (1, 3, 3, 2, 800, ((88, 264, 792), 44)),
        (1, 2, 4, 3, 100, ((24, 96), 8)),
        (1, 3, 10, 5, 20, ((1, 10, 100), 1)),
        (0.2, 1, 3, 2, 320, ((64,), 32)),
        (0.29, 1, 3, 1, 100, ((29,), 29)),  # 100 * 0.29 is 28.999...
        (0.01, 1, 3, 1, 10, ((1,), 1)),
        (0.5, 2, 3, 1, 180, ((30, 90), 30)),
    ],
)
def test_lengths_of_the_rungs(share, rungs, factor, evaluations, steps, expected):
    """Every rung ends with an evaluation, which a longer run makes as well."""
    search = Search({}, 0.2, share=share, rungs=rungs, factor=factor, evaluations=evaluations)
    found, every = lengths(search, steps)
    assert (found, every) == expected
    assert rungs == 1 or all(length % every == 0 for length in found)


def halving(scores, rungs, factor):
    """Oracle: setting -> its score on every rung; the settings of every rung, and the best one."""
    left, seen = list(scores), []
    for rung in range(rungs):
        if len(left) == 1:
            break
        seen.append(list(left))
        left.sort(key=lambda name: scores[name][rung], reverse=True)
        left = left[: 1 if rung == rungs - 1 else math.ceil(len(left) / factor)]
    return seen, left[0]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(
    ("share", "rungs", "factor"),
    [(1, 1, 3), (1, 2, 3), (1, 3, 2), (1, 3, 3), (0.25, 1, 3), (0.5, 2, 3)],
)
def test_the_search_follows_the_loop(study, schedule, share, rungs, factor):
    """Rung by rung; what has no score yet is what is run next."""
    rates = [10.0**-n for n in range(1, 8)]
    tune = {"grid": {"optim.lr": rates}, "share": share, "rungs": rungs, "factor": factor}
    sweep = study(tune=tune, settings={"optim.schedule": schedule, "length.steps": 36})
    scores = {  # those of a longer run are better, and in another order
        name: [((3 * i + 5 * rung) % 7 + 10 * rung) / 100 for rung in range(rungs)]
        for i, name in enumerate(labels(sweep.settings[""]))
    }
    seen, best = halving(scores, rungs, factor)
    of_rungs, every = lengths(sweep.search, 36)
    for rung, expected in enumerate(seen):
        ((search,), (stage,)) = searches(sweep), stages(sweep)
        assert [trial.setting.label for trial in search.rungs[rung]] == expected
        assert len(set(names(stage))) == len(expected)
        for trial in search.rungs[rung]:
            (run,) = trial.runs
            assert run in stage.runs
            assert load(run.files, run.sets) == run.config
            assert (run.config.length.steps, run.config.eval.every_steps) == (of_rungs[rung], every)
            if (
                trial is search.rungs[rung][-1]
            ):  # a launcher that was killed goes on with the others
                assert stages(sweep) == (stage,)
            first = rung if schedule == "cosine" else 0
            told = zip(
                of_rungs[first : rung + 1], scores[trial.setting.label][first:], strict=False
            )
            write_run(run, dict(told))
    ((search,), (final,)) = searches(sweep), stages(sweep)
    assert search.chosen.label == best
    assert names(final) == ["seed0", "seed1"]
    assert {run.config.optim.lr for run in final.runs} == {rates[list(scores).index(best)]}
    assert {run.config.length.steps for run in final.runs} == {36}


def ended(sweep, scores):
    """Write the runs of the open rung, with one score each."""
    for run, score in zip(stages(sweep)[0].runs, scores, strict=True):
        write_run(run, {run.config.length.steps: score})


def test_a_run_that_is_being_made_longer_keeps_its_earlier_score(study):
    """On resuming, metrics.jsonl is cut back to the checkpoint, which is older than the last evaluation;
    the earlier result stands until the longer run has ended."""
    sweep = study()
    ended(sweep, [0.1, 0.4, 0.3, 0.2])
    ((search,), (stage,)) = searches(sweep), stages(sweep)
    assert names(stage) == ["lr0.0001-seed0", "lr0.001-seed0"]
    run = stage.runs[0]
    folder = folder_of(run.config)
    earlier = (folder / "result.json").read_text()
    write_run(run, {}, ended=False)
    assert (folder / "result.json").read_text() == earlier
    assert stages(sweep) == (stage,)
    assert searches(sweep) == (search,)
    write_run(run, {6: 0.4, 12: 0.45}, ended=False)
    (folder / "result.json").unlink()
    assert stages(sweep) == (stage,)
    write_run(run, {6: 0.4, 12: 0.5, 18: 0.45})
    ((search,), (stage,)) = searches(sweep), stages(sweep)
    assert [trial.score for trial in search.rungs[1]] == [0.5, None]
    assert [trial.score for trial in search.rungs[0]] == [0.1, 0.4, 0.3, 0.2]


def test_a_setting_is_the_mean_of_its_seeds(study):
    sweep = study(tune={"grid": {"optim.lr": [1e-4, 1e-3]}, "seeds": [4, 5], "rungs": 1})
    (stage,) = stages(sweep)
    assert names(stage) == [f"{lr}-seed{seed}" for lr in ("lr0.0001", "lr0.001") for seed in (4, 5)]
    ended(sweep, [0.9, 0.1, 0.5, 0.6])
    (search,) = searches(sweep)
    assert [trial.score for trial in search.rungs[0]] == [0.5, 0.55]
    assert search.chosen.label == "lr0.001"


def test_of_equals_the_first_goes_on_and_a_single_one_needs_no_run(study):
    sweep = study(tune={"grid": {"optim.lr": [1e-4, 1e-3, 1e-2]}})
    ended(sweep, [0.2, 0.4, 0.4])
    (search,) = searches(sweep)
    assert (len(search.rungs), search.chosen.label) == (1, "lr0.001")


def test_a_setting_that_diverges_is_out(study):
    sweep = study(tune={"rungs": 1}, grid={"model.embedding_size": [16, 32]})
    (stage,) = stages(sweep)
    for run in stage.runs:
        if run.config.optim.lr == 1e-2 or run.config.model.embedding_size == 32:
            write_run(run, {}, failed=DIVERGED)
        else:
            write_run(run, {18: run.config.optim.lr})
    sound, hopeless = searches(sweep)
    assert sound.chosen.label == "lr0.001"
    assert hopeless.has_failed
    (final,) = stages(sweep)
    assert names(final) == ["embedding_size16-seed0", "embedding_size16-seed1"]


def test_another_failure_holds_up_its_point_alone(study, capsys):
    sweep = study(tune={"rungs": 1}, grid={"model.embedding_size": [16, 32]})
    (stage,) = stages(sweep)
    for run in stage.runs:
        write_run(run, {18: 0.5}, failed=2 if run is stage.runs[0] else None)
    waiting, chosen = searches(sweep)
    assert (waiting.chosen, chosen.chosen.label) == (None, "lr1e-05")
    _, final = stages(sweep)
    assert {run.point for run in final.runs} == {"embedding_size32"}
    assert main(["--sweep", sweep.path, "--status"]) == 0
    said = capsys.readouterr().out
    assert "embedding_size16-lr1e-05-seed0 failed: bad" in said
    assert "3 finished" in said


def test_runs_of_another_search_are_refused(study, capsys):
    """Their evaluations came at other steps."""
    sweep = study()
    ended(sweep, [0.1, 0.4, 0.3, 0.2])
    changed = study(tune={"rungs": 3})
    assert main(["--sweep", changed.path, "--executor", "local"]) == 2
    assert "is a run of another config: eval.every_steps was 6 and is 2" in capsys.readouterr().err


def test_kept():
    search = Search({}, 0.2, factor=3)
    assert [kept(search, n) for n in (1, 2, 3, 4, 9, 10)] == [1, 1, 1, 2, 3, 4]


# ---- the launcher -----------------------------------------------------------------------------------


@pytest.fixture
def launch(study, tmp_path, capsys):
    """Calls launch/slurm.py with the sweep that was written last."""
    study()

    def say(*arguments, code=0):
        found = main(["--sweep", str(tmp_path / "study.yaml"), *arguments])
        said = "".join(capsys.readouterr())
        assert found == code, said
        return said

    return say


def test_what_a_search_takes_is_said_before_it_starts(study, launch):
    said = launch("--dry-run", "--executor", "local", "--images-per-second", "96")
    table, budget, *_ = said.split("\n\n")
    header, row = (line.split() for line in table.splitlines())
    assert " ".join(header) == "point settings rung 1 rung 2 test steps images hours"
    # 4 runs of 6 steps, 2 of them on to 18, and 2 seeds of 18 with batches of 16 x 3
    assert row[:2] == ["study", "4"]
    assert " ".join(row[2:11]) == "4 x 6 2 x 18 2 x 18"
    steps = 4 * 6 + 2 * 12 + 2 * 18
    assert row[11:] == [str(steps), f"{48 * steps:,}", "0.01", "assumed"]
    assert budget == (
        f"budget: 6 runs, {steps} steps, {48 * steps:,} images, 0.01 hours of training, without "
        "evaluations"
    )
    assert "study-tune: 4 new" in said


def test_what_a_search_of_short_runs_takes(study, launch):
    study(tune={"share": 0.5, "rungs": 1, "factor": None})
    table = launch("--dry-run", "--executor", "local").splitlines()
    assert " ".join(table[0].split()[:6]) == "point settings rung 1 test steps"
    assert " ".join(table[1].split()[:8]) == "study 4 4 x 9 2 x 18"


def test_unequal_budgets_are_said(study, launch):
    assert "not the same" not in launch("--dry-run")
    own = {"loss.name": "nca", "tune": {"loss.tau": [0.1, 1]}}
    study(grid={"loss": {"ms": {}, "nca": own}})
    assert "the budgets are not the same: 4 to 8 settings per point" in launch("--dry-run")


def test_status_and_config_of_a_search(study, launch):
    assert "study         4  1 of 2  0 of 4" in launch("--status")
    said = launch("--print-config", "--only", "seed0", code=2)
    assert "seed0 has no settings yet; --status shows how far the search is" in said
    sweep = study()
    ended(sweep, [0.1, 0.4, 0.3, 0.2])
    assert "study         4  2 of 2  0 of 2" in launch("--status")
    for run, score in zip(stages(sweep)[0].runs, (0.6, 0.7), strict=True):
        write_run(run, {6: 0.3, 18: score})
    assert "2 of 2  lr0.001 70.00%  lr0.001" in launch("--status")
    found = yaml.safe_load(launch("--print-config", "--only", "seed1"))
    assert (found["optim"]["lr"], found["run"]["seed"], found["eval"]["test"]) == (1e-3, 1, True)


def test_on_slurm_every_call_submits_what_follows(study, launch, monkeypatch):
    """And --watch does so by itself. Slurm here is a list: jobs end as soon as they are submitted."""
    submitted = []

    def submit(name, runs):
        submitted.append((name, [run.name for run in runs]))
        for run in runs:
            if run.config.eval.test:
                write_run(run, {18: 0.5})
            else:
                steps = [step for step in (6, 18) if step <= run.config.length.steps]
                write_run(run, dict.fromkeys(steps, run.config.optim.lr))
        return ["7"]

    monkeypatch.setattr("launch.starting.submit", submit)
    first = ("study-tune", [f"lr{lr}-seed0" for lr in ("1e-05", "0.0001", "0.001", "0.01")])
    assert "the same command submits those that follow; --watch 60 would" in launch()
    assert submitted == [first]
    second, last = ("study-tune", ["lr0.01-seed0", "lr0.001-seed0"]), ("study", ["seed0", "seed1"])
    launch()
    assert submitted == [first, second]
    said = launch("--watch", "0.01")
    assert submitted == [first, second, last]
    assert "2 finished" in said


def test_who_watches_may_leave(launch, monkeypatch):
    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.starting.submit", lambda name, runs: ["7"])
    monkeypatch.setattr("launch.starting.time.sleep", sleep)
    assert "the same command submits what follows them" in launch("--watch", "5", code=75)


def test_only_some_points(study, capsys):
    sweep = study(grid={"model.embedding_size": [16, 32]})
    assert main(["--sweep", sweep.path, "--status", "--only", "embedding_size32"]) == 0
    said = capsys.readouterr().out
    assert "embedding_size32-lr0.01-seed0" in said
    assert "embedding_size16" not in said


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_search_on_this_machine_is_killed_and_goes_on(study, tmp_path):
    """From the first rung to the test classes, with real runs. The launcher is killed on the way, and
    the first call after it must not begin anew what has ended. Oracle: halving of the recorded scores."""
    sweep = study(tune={"grid": {"optim.lr": [1e-4, 1e-3, 1e30]}, "factor": 2}, seeds=[0])
    command = [ROOT / "launch/slurm.py", "--sweep", sweep.path, "--executor", "local"]

    def start():
        return OnThisMachine(command, environment(), tmp_path / "log")

    with start() as launcher:
        first = folder_of(sweep.settings[""][0].tried[0].config)
        deadline = time.monotonic() + 200
        while not (first / "result.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = (first / "model.safetensors").stat().st_mtime_ns
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=100)
        assert launcher.returncode == 75
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    with start() as launcher:
        said, _ = launcher.communicate(timeout=700)
    assert launcher.returncode == 0, said
    (search,) = searches(sweep)
    for rung, steps in zip(search.rungs, (9, 18), strict=True):
        for trial in rung:
            run = folder_of(trial.runs[0].config)
            if not trial.diverged:
                told = [line for line in lines(run) if "split" in line and line["step"] <= steps]
                assert {line["split"] for line in told} == {"validation"}
                assert trial.score == max(line["recall@1"] for line in told)
    best = max(search.rungs[-1], key=lambda trial: trial.score or -1)
    assert search.chosen == best.setting
    assert [trial.diverged for trial in search.rungs[0]] == [False, False, True]
    (run,) = search.chosen.final
    found = result(folder_of(run.config))
    assert found["validation_recall@1"] is None
    assert 0 < found["recall@1"] <= 1
    with start() as launcher:
        said, _ = launcher.communicate(timeout=300)
    assert "study: 1 finished" in said
    assert "1/1" not in said
