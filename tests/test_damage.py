"""Damaged files in a run's folder: the run is shown as damaged with its file, the others as usual.

Oracle: the rows of the other runs as they are without damage; no exception leaves the programs.
"""

import csv
import json
import os
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweeping import Sweeping

from dml.config import to_yaml
from dml.run_folder.files import DamagedError, read_json, read_lines
from launch.outcome import MAX_STARTS, note, record_outcome
from launch.report import main as report
from launch.slurm import main as slurm
from launch.submission import read_submissions
from launch.sweep import read_sweep

FILES = {
    "result.json": {
        "step": 30,
        "recall@1": 0.5,
        "images": 1440,
        "trained_steps": 30,
        "seconds": 9.5,
    },
    "failed.json": {"reason": "no shards", "code": 2, "log": ["line 1", "line 2"]},
    "restarts.json": {"step": 5, "times": 1, "code": 75},
    "plan.json": {"steps": 30},
    "metrics.jsonl": {"step": 10, "split": "test", "recall@1": 0.25},
    "timing.jsonl": {"step": 10, "images_per_second": 100.0},
    "config.yaml": None,  # the run's own
}
# What a file needs of the others to be read at all: a finished run needs no restarts.json.
ALONE = {"restarts.json", "metrics.jsonl", "timing.jsonl"}
DAMAGES = {
    "list": b"[]\n",
    "number": b"12\n",
    "text": b'"x"\n',
    "half": b'{"step": 1, "re\n',
    "binary": bytes(range(256)),
    "zeros": b"\0" * 512 + b"\n",
    "nested": b'{"step": ' + b"[" * 100_000 + b"\n",
    "nested, closed": b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "digits": b'{"step": ' + b"9" * 5_000 + b"}\n",
    "latin-1": '{"step": "é"}\n'.encode("latin-1"),
    "utf-16": '{"step": 1}\n'.encode("utf-16"),
}
# the values that a key may not have
ODD = [[], {}, "x", -1, float("nan"), 10**300, 10**4000, True]


def odd_values(file):
    """The file with every key in turn set to odd values."""
    for key in {"code": None} | (FILES[file] or {}):
        for value in ODD:
            yield json.dumps({**FILES[file], key: value}).encode() + b"\n"


def good(folder, config):
    """A run that has every file; a test removes those that would hide the damaged one."""
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        text = to_yaml(config) if content is None else json.dumps(content) + "\n"
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A sweep of four runs: a is the one to be damaged; the others are finished, stopped, failed."""
    root = tmp_path_factory.mktemp("damage")
    sweep = Sweeping(root, {name: {} for name in "abcd"})
    sweep.good = root / "good"
    for run in read_sweep(sweep.path).runs:
        good(sweep.runs[run.name[0]], run.config)
    shutil.copytree(sweep.runs["a"], sweep.good)
    for name, files in {"c": ("result.json", "failed.json"), "d": ("result.json",)}.items():
        for file in files:
            (sweep.runs[name] / file).unlink()
    return sweep


@pytest.fixture
def status(study, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")

    def rows(*options):
        """Run -> its row."""
        assert slurm(["--sweep", str(study.path), *(options or ["--status"])]) == 0
        said = capsys.readouterr().out
        return {line[0]: line for line in said.splitlines() if re.match(r"[a-d]-seed0 ", line)}

    return rows


@pytest.fixture
def reported(study, tmp_path):
    def rows():
        """Run -> its line of runs.csv."""
        assert report([str(study.folder / "runs"), "--out", str(tmp_path / "out")]) == 0
        with (tmp_path / "out" / "runs.csv").open(newline="") as file:
            return {line["run"][0]: line for line in csv.DictReader(file)}

    return rows


def reset(study, file):
    """Run a is whole again, and `file` is the one that says how it stands."""
    shutil.rmtree(study.runs["a"])
    shutil.copytree(study.good, study.runs["a"])
    if file in ALONE:
        (study.runs["a"] / "result.json").unlink()
        (study.runs["a"] / "failed.json").unlink()
    if file in ("failed.json", "config.yaml"):
        (study.runs["a"] / "result.json").unlink()
    if file == "config.yaml":  # the reason of a failure counts more
        (study.runs["a"] / "failed.json").unlink()
    return study.runs["a"] / file


def others(rows):
    return {name: row for name, row in rows.items() if name != "a"}


def unwidened(row):
    """A row without its padding: the widths of the columns depend on all rows."""
    return " ".join(row.split())


def check(path, before, after):
    """before and after: of `status` and `reported`. The file is damaged where it is read."""
    (status, table), (status_now, table_now) = before, after
    assert {k: unwidened(v) for k, v in others(status_now).items()} == {
        k: unwidened(v) for k, v in others(status).items()
    }
    assert others(table_now) == others(table)
    shown = status_now["a"]
    if path.name != "plan.json":  # --status makes the plan itself
        assert shown.split()[1] == "damaged", shown
        assert str(path) in shown
    if path.name != "restarts.json":  # a report does not count starts
        assert table_now["a"]["state"] == "damaged", table_now["a"]
        assert str(path) in table_now["a"]["note"]


@pytest.mark.parametrize(
    "damage", [*DAMAGES, "empty", "folder", "pipe", "link to itself", "device"]
)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_other_runs_are_shown_as_usual(
    study, status, reported, file, damage
):
    path = reset(study, file)
    before = status(), reported()
    assert before[0]["a"].split()[1] != "damaged"
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "link to itself":
        path.symlink_to(path)
    elif damage == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(DAMAGES.get(damage, b""))
    after = status(), reported()
    if damage == "empty" and file.endswith("l") and file != "config.yaml":
        assert after[0]["a"].split()[1] == "stopped", "no lines yet"
    else:
        check(path, before, after)
    assert status("--dry-run").keys() == {*"abcd"}


@pytest.mark.parametrize("file", [file for file in FILES if file != "config.yaml"])
def test_odd_values_are_damage_or_do_no_harm(study, status, reported, file):
    """A key that nobody reads may hold anything."""
    damaged = 0
    for content in odd_values(file):
        path = reset(study, file)
        path.write_bytes(content)
        after = status(), reported()
        assert after[0].keys() == after[1].keys() == {*"abcd"}
        states = after[0]["a"].split()[1], after[1]["a"]["state"]
        assert {"b": "finished", "c": "unfinished", "d": "failed"}.items() <= {
            name: line["state"] for name, line in after[1].items()
        }.items()
        damaged += "damaged" in states
    assert damaged >= 7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from([file for file in FILES if file != "config.yaml"]),
    keys=st.dictionaries(
        st.sampled_from(
            ["step", "recall@1", "recall@²", "recall@" + 30 * "9", "reason", "log", "note", "times"]
        )
        | st.text(max_size=5),
        JSON,
        max_size=4,
    ),
    kept=st.booleans(),
)
def test_any_json_is_shown(study, status, reported, file, keys, kept):
    path = reset(study, file)
    path.write_text(json.dumps({**(FILES[file] if kept else {}), **keys}) + "\n")
    assert status().keys() == reported().keys() == {*"abcd"}
    assert status("--dry-run").keys() == {*"abcd"}


def test_a_sparse_file_larger_than_memory_is_not_read(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)
    for read in (read_json, read_lines):
        with pytest.raises(DamagedError, match=rf"^{re.escape(str(path))} is damaged: "):
            read(path)


def test_a_checkpoint_with_an_odd_name_is_no_step(study, status):
    reset(study, "metrics.jsonl")
    for name in ("step-²", "step-" + 200 * "9", "step-x"):
        (study.runs["a"] / "checkpoints" / name).mkdir(parents=True)
    assert "10/30" in status()["a"]


@pytest.mark.parametrize("damage", [*DAMAGES.values(), b'{"step": "x"}', b'{"times": []}', None])
def test_a_damaged_count_of_restarts_starts_anew(tmp_path, damage):
    path = tmp_path / "restarts.json"
    if damage is None:
        path.mkdir()
    else:
        path.write_bytes(damage)
    for times in range(1, MAX_STARTS):
        assert record_outcome(tmp_path, 75, [])
        assert json.loads(path.read_bytes()) == {"step": 0, "times": times, "code": 75}
    assert not record_outcome(tmp_path, 75, [])
    assert (
        f"{MAX_STARTS} times in a row"
        in json.loads((tmp_path / "failed.json").read_bytes())["reason"]
    )


@pytest.mark.parametrize("kind", ["sparse", "pipe", "folder"])
def test_the_end_of_a_log_is_read(tmp_path, kind):
    """A run is started again until it has ended five times in a row, whatever its log is."""
    log = tmp_path / "log"
    if kind == "sparse":
        with log.open("wb") as file:
            file.seek(2**40)
            file.write(b"\ndml/train.py: the last words\n")
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(log)
    while record_outcome(tmp_path, 1, [log]):
        pass
    reason = json.loads((tmp_path / "failed.json").read_bytes())["reason"]
    assert reason.endswith("the last words" if kind == "sparse" else "its log is empty")


def test_a_note_replaces_a_damaged_one(tmp_path):
    (tmp_path / "restarts.json").write_bytes(b"[")
    note(tmp_path, "could not be requeued")
    assert json.loads((tmp_path / "restarts.json").read_bytes()) == {
        "note": "could not be requeued"
    }


@pytest.mark.parametrize(
    "entry",
    [3, [], {"name": [], "runs": ["a"], "job": "7"}, {"name": "x", "runs": 3, "job": None},
     {"name": "x", "runs": [3], "job": None}, {"name": "x", "runs": ["a"], "job": 7},
     {"name": "x", "runs": ["a"]}],
)  # fmt: skip
def test_a_damaged_submission_is_one_sentence(tmp_path, entry):
    (tmp_path / "sweep.json").write_text(json.dumps({"submissions": [entry]}))
    with pytest.raises(RuntimeError, match=r"sweep.json is damaged; remove it when no job"):
        read_submissions(tmp_path)
