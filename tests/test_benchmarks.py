"""The benchmarks run, and the page says what they found. What they measure is no test."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks"
NO_PART = {"measure", "page", "bars", "gpu_loss"}  # shared code, and what needs a GPU
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_PART)
SMALL = {
    "caching": "--batch 8 --repeats 1",
    "loader": "shards/bundled/icons-mini --images 320 --repeats 1",
    "loss": "--sizes 40 --repeats 1",
    "loss_memory": "--sizes 128 256 --repeats 1",
    "losses": "--m 40 --repeats 1",
    "recall": "--n 2000 --d 16 --repeats 1",
    "scale": "--m 64 --d 16 --repeats 1",
    "startup": "--repeats 1",
    "training_step": "--classes 4 --steps 30",
    "two_hosts": "--m 40 --d 8 --repeats 1",
}


@pytest.fixture
def run(monkeypatch):
    """benchmarks/run.py as a module."""
    monkeypatch.syspath_prepend(HERE)
    import run

    return run


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    import measure

    return measure


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    command = [sys.executable, HERE / f"{program}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"benchmarks/{program}.py" in done.stdout


def test_every_program_is_a_part(run):
    assert sorted([*run.PARTS, "run"]) == PROGRAMS == sorted([*SMALL, "run"])


@pytest.mark.parametrize("program", SMALL)
def test_in_small(program, run, measure, tmp_path):
    found = tmp_path / "rows.json"
    command = [sys.executable, HERE / f"{program}.py", *SMALL[program].split(), "--json", found]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == run.CANNOT:
        pytest.skip(done.stderr)
    assert done.returncode in (0, 1), done.stderr  # 1: at such a size goals are missed
    rows = measure.read_rows(found)
    assert rows
    assert all(row.ratio >= 0 for row in rows)
    assert "Traceback" not in done.stderr


@pytest.fixture
def parts(run, measure, monkeypatch, tmp_path):
    """Four benchmarks that measure nothing: met, missed, crashed, and cannot run here."""
    import page

    def program(name, code):
        (tmp_path / f"{name}.py").write_text(f'"""What {name} measures."""\n{code}\n')

    for name, ratio in (("good", 1.25), ("slow", 1.75)):
        rows = [
            measure.Row(name, "a <thing>", "3 ms", "the limit", ratio, "1.1 - 1.9", "<= 1.5"),
            measure.Row(name, "a peer", "9 ms", "the limit", 40.0, "39 - 41"),
        ]
        text = json.dumps([asdict(row) for row in rows])
        program(name, f"import sys\nopen(sys.argv[-1], 'w').write({text!r})")
    program("broken", "raise RuntimeError('out of luck')")
    program("elsewhere", "import sys\nprint('needs root', file=sys.stderr)\nsys.exit(2)")
    names = ["good", "slow", "broken", "elsewhere"]
    monkeypatch.setattr(run, "PARTS", {name: [] for name in names})
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(page, "HERE", tmp_path)
    return tmp_path / "out"


def written(out):
    svg = (out / "images" / "benchmarks.svg").read_text()
    ET.fromstring(svg)
    return (out / "benchmarks.md").read_text(), svg


def test_a_page_of_goals_met(run, parts, capfd):
    assert run.main(["--only", "good", "elsewhere", "--out", str(parts)]) == 0
    text, svg = written(parts)
    assert "1 of 1 goals are met" in text
    assert "What good measures." in text
    assert "| a <thing> | 3 ms | the limit | 1.25 | 1.1 - 1.9 | <= 1.5 | met |" in text
    assert "| a peer | 9 ms | the limit | 40 | 39 - 41 |  |  |" in text
    assert "- not run: elsewhere: needs root" in text
    assert "benchmarks/run.py --only good elsewhere" in text
    assert "a &lt;thing&gt; / the limit" in svg
    assert "all goals met" in capfd.readouterr().err


def test_a_missed_goal_and_a_crash_are_named(run, parts, capfd):
    assert run.main(["--out", str(parts)]) == 1
    text, svg = written(parts)
    assert "1 of 2 goals are met" in text
    missed = "missed: slow: a <thing>: 1.75 against the limit, goal <= 1.5"
    assert f"- {missed}\n" in text
    assert "- not run: broken: RuntimeError: out of luck (exit code 1)" in text
    assert 'class="missed"' in svg
    err = capfd.readouterr().err
    assert missed in err
    assert "failed: broken: RuntimeError: out of luck" in err
    assert "failed: elsewhere" not in err


def test_rows_survive_json(measure, tmp_path, capsys):
    rows = [
        measure.compared("a", "b", "1 s", "c", [1, 2, 30], ">= 2"),
        measure.timed("a", "d", [0.002, 0.004], "c", [0.001, 0.001], "< 3"),
    ]
    assert [row.ok for row in rows] == [True, False]
    assert [row.ratio for row in rows] == [2, 3]
    assert [row.spread for row in rows] == ["1 - 30", "2 - 4"]
    assert rows[1].value == "3 ms"
    assert measure.finish(rows, tmp_path / "rows.json") == 1
    assert measure.read_rows(tmp_path / "rows.json") == rows
    assert "missed: a: d: 3 against c, goal < 3" in capsys.readouterr().err


def test_repetitions_are_interleaved(measure):
    order = []
    work = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = measure.interleaved(work, 2)
    assert "".join(order) == "ababab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_extra_memory(measure):
    mib = measure.extra_memory(lambda: bytearray(b"x" * (64 * measure.MIB))) / measure.MIB
    assert 60 < mib < 300
