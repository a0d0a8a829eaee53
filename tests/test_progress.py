"""What people see of a run's progress: a bar on a terminal, lines in a log, no warnings of libraries."""

import io
import re
import time
from contextlib import closing

import pytest
import torch
from fleet import ROOT, WORKERS, start_each
from runs import Launched

from dml.config import load
from dml.distributed.workers import loader_workers
from dml.gpw import make_loss
from dml.gpw.monitor import PairReport
from dml.plan import plan
from dml.run_folder import reporter
from dml.run_folder.events import Pairs
from dml.run_folder.progress import Progress
from shards import output


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


# ---- build, embed -----------------------------------------------------------------------------------


def test_a_log_has_a_line_per_minute(clock, capsys):
    with closing(output.Progress(1000, "image")) as progress:
        for _ in range(10):
            clock.now += 15
            progress.update(30)
    assert capsys.readouterr().err.splitlines() == [
        "120 of 1,000 images, 2.0 per second, 0:07:20 left",
        "240 of 1,000 images, 2.0 per second, 0:06:20 left",
    ]


def test_what_was_done_before_is_not_speed(clock, capsys):
    with closing(output.Progress(100, "step", label="1/3 bs20", done=40)) as progress:
        clock.now += 100
        progress.update(0)
        clock.now += 100
        progress.update(20)
    assert capsys.readouterr().err.splitlines() == [
        "1/3 bs20: 40 of 100 steps, 0.0 per second, unknown time left",
        "1/3 bs20: 60 of 100 steps, 0.1 per second, 0:06:40 left",
    ]


def test_a_terminal_has_a_bar_instead(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with closing(output.Progress(10, "image")) as progress:
        for _ in range(10):
            clock.now += 60
            progress.update()
    assert "10/10" in stream.getvalue()
    assert "left" not in stream.getvalue()


# ---- training ---------------------------------------------------------------------------------------


class Said:
    """As much of a team and of a journal as a reporter needs."""

    first = True

    def __init__(self):
        self.lines, self.events = [], []
        self.say, self.log = self.lines.append, self.events.append


@pytest.fixture
def reported(clock, monkeypatch, capsys):
    """Steps of 20 s each, reported after every one: (lines, events)."""
    nothing = PairReport(0, 0, 0, None, None, None)
    monkeypatch.setattr(reporter, "pair_report", lambda *arguments: nothing)

    class Loss:
        loss, memory = make_loss("multi_similarity"), None
        wire = type("Wire", (), {"bytes_sent": 0})

    class Timing:
        def timing(self, size, sent):
            return {}

    def steps(count, before=0, log_steps=2):
        config = load(ROOT / "configs/icons_mini.yaml", [f"run.log_steps={log_steps}"])
        said, progress = Said(), Progress(step=before)
        found = reporter.Reporter(said, said, plan(config), config, Loss(), Timing(), progress)
        for _ in range(count):
            clock.now += 20
            progress.count(0.5, 0)
            found.report({"loss": 0.5}, torch.empty(0), torch.empty(0))
        found.close()
        return said

    return steps


def test_training_without_a_terminal_says_where_it_is_once_per_minute(reported, capsys):
    said = reported(7, before=100, log_steps=10)
    assert said.lines == [
        "step 103 of 300  loss 0.5000  12.0 images/s  1:05:40 left",
        "step 106 of 300  loss 0.5000  12.0 images/s  1:04:40 left",
    ]
    assert capsys.readouterr().err == ""


def test_histograms_come_from_the_first_line_on_and_then_rarely(reported):
    """A pair report per 10 lines of metrics."""
    said = reported(60)
    assert [e.step for e in said.events if isinstance(e, Pairs)] == [2, 20, 40, 60]


# ---- loader processes, and warnings -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "local", "workers"), [(2, 2, 1), (2, 1, 1), (1, 1, 1), (8, 2, 3), (64, 4, 8)]
)
def test_loader_processes_are_chosen_by_the_cores(monkeypatch, cores, local, workers):
    monkeypatch.setattr("dml.distributed.processes.available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    icons = ROOT / "configs" / "icons_mini.yaml"
    assert loader_workers(load(icons)) == workers
    assert loader_workers(load(icons, ["data.workers=0"])) == 0
    assert loader_workers(load(icons, ["model.backbone=none"])) == 0
    assert loader_workers(load(icons, ["model.backbone=none", "data.workers=2"])) == 2


@pytest.mark.training
def test_libraries_are_quiet_and_a_log_has_no_carriage_return(tmp_path):
    """A network for which DDP warns of strides, and the default number of loader processes, for which
    torch's DataLoader may warn."""
    sets = ["model.backbone=efficientnet_lite0", "data.size=64", "data.workers=null"]
    run = Launched(2, tmp_path, *sets, "length.steps=2", "optim.schedule=constant")
    assert run.end() == [0, 0], run.said
    assert not re.search("warning", run.said, re.IGNORECASE), run.said
    assert "\r" not in run.log.read_bytes().decode()


# ---- python -m dml.plan --measure -------------------------------------------------------------------

MINI = [
    "--config",
    str(ROOT / "configs/icons_mini.yaml"),
    "--set",
    "data.size=16",
    "batch.classes=16",
]


def measured(folder, *words):
    """How the program ends, in a process of its own, of which the training is a fork."""
    program = [WORKERS / "launching.py", ROOT / "dml/plan.py"]
    temporary = {"TMPDIR": str(folder)}
    (ended,) = start_each([*program, *MINI, *words, "--measure"], [temporary], timeout=280)
    return ended


@pytest.mark.training
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_plan_measures_some_steps_and_keeps_nothing(processes, tmp_path):
    before = set((ROOT / "runs").glob("*"))
    ended = measured(tmp_path, "length.epochs=2", "--processes", processes)
    assert ended.returncode == 0, ended.stderr
    speed = float(
        re.search(r"^measured +([\d,.]+) images/s", ended.stdout, re.MULTILINE)[1].replace(",", "")
    )
    found = re.search(
        r"^estimated time +(\d+):(\d+):(\d+) for (\d+) steps", ended.stdout, re.MULTILINE
    )
    hours, minutes, seconds, steps = map(int, found.groups())
    assert steps == 63  # by hand: 2 epochs of 1,500 images in batches of 48
    assert 3600 * hours + 60 * minutes + seconds == pytest.approx(63 * 48 / speed, abs=1)
    assert list(tmp_path.iterdir()) == []
    assert set((ROOT / "runs").glob("*")) == before


@pytest.mark.training
def test_a_plan_that_cannot_be_measured_says_why(tmp_path):
    ended = measured(tmp_path, "model.weights=nowhere.pth")
    assert ended.returncode == 2
    words = "--measure: the training ended after 0 steps: model.weights = nowhere.pth"
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
