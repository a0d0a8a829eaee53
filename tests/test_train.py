"""Whole runs on the bundled icons, as users start them. Oracle: the same run, undisturbed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fleet import ROOT, environment, free_port, start
from safetensors.torch import load_file

TRAIN = ROOT / "dml" / "train.py"
ICONS = ROOT / "shards" / "bundled" / "icons-mini"
BASE = [
    "--config",
    str(ROOT / "configs" / "icons_mini.yaml"),
    "--set",
    f"data.shards={ICONS}",
    "batch.classes=16",
    "optim.schedule=cosine",
    "model.embedding_size=32",
    "length.steps=30",
    "run.log_steps=1",
    "eval.every_steps=null",
    "eval.untrained=false",
]
CONVNET = ["optim.lr=1e-4"]
FROZEN = [
    "optim.lr=1e-5",
    "model.backbone=efficientnet_lite0",
    "model.weights=pretrained",
    "data.size=32",
]


def train(processes, folder, *sets, timeout=280):
    """Run to the end; all processes must end alike. Returns the run's folder and their output."""
    ended = start(TRAIN, processes, *BASE, f"run.dir={folder}", *sets, timeout=timeout)
    codes = {process.returncode for process in ended}
    assert codes == {0}, "\n".join(process.stderr for process in ended)
    return Path(folder) / "icons_mini"


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def content(run):
    """What must be the same to the bit."""
    return (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()


# ---- the same run for any number of processes -----------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, made when first asked for."""
    known = {}

    def run(*sets):
        if sets not in known:
            known[sets] = train(1, tmp_path_factory.mktemp("alone"), *sets)
        return known[sets]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "tolerance"),
    [
        (CONVNET, "fp32", 1e-4),
        (CONVNET, "fp64", 1e-10),
        (FROZEN, "fp32", 1e-4),
        (FROZEN, "fp64", 1e-10),
    ],
    ids=["convnet-fp32", "convnet-fp64", "frozen-fp32", "frozen-fp64"],
)
@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 10), (2, None), (4, None), (4, 5)])
def test_the_loss_curve_does_not_depend_on_the_processes(
    alone, model, precision, tolerance, processes, micro_batch, tmp_path
):
    how = [*model, f"engine.precision={precision}"]
    expected = losses(alone(*how))
    micro = [] if micro_batch is None else [f"engine.micro_batch={micro_batch}"]
    found = losses(train(processes, tmp_path, *how, *micro))
    assert len(found) == len(expected) == 30
    assert found == pytest.approx(expected, rel=tolerance)
    assert len({*expected}) == 30, "nothing was learned"


# ---- interrupted runs -----------------------------------------------------------------------------

EVENTFUL = [
    "save.every_minutes=1e-6",  # after every step
    "eval.every_steps=10",
    "eval.validation_classes=0.1",
    "eval.untrained=true",
]
DDP = ["--config_file", str(ROOT / "configs/accelerate/cpu_x2.yaml")]
ZERO2, ZERO3 = (
    ["--config_file", str(ROOT / f"configs/accelerate/zero{stage}.yaml"), "--num_processes", "2"]
    for stage in (2, 3)
)


class Launched:
    """A run under `accelerate launch`, or without it so that each process has its own exit code."""

    def __init__(self, how, folder, *sets):
        self.run, self.log = Path(folder) / "icons_mini", Path(folder) / f"{time.monotonic_ns()}"
        Path(folder).mkdir(exist_ok=True)
        port, command = str(free_port()), [TRAIN, *BASE, f"run.dir={folder}", *EVENTFUL, *sets]
        if isinstance(how, int):
            launcher = [sys.executable]
            ranks = [
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(how),
                    "LOCAL_WORLD_SIZE": str(how),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                for rank in range(how)
            ]
        else:
            launcher = ["accelerate", "launch", "--main_process_port", port, *how]
            ranks = [{} if how is DDP else {"DS_ACCELERATOR": "cpu"}]
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    [*launcher, *map(str, command)],
                    cwd=ROOT,
                    env=environment(**rank),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for rank in ranks
            ]

    @property
    def said(self):
        return self.log.read_text()

    def until(self, steps, evaluations=0):
        """Wait for so many lines of metrics."""
        deadline, metrics = time.monotonic() + 200, self.run / "metrics.jsonl"
        while time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            text = metrics.read_text() if metrics.exists() else ""
            if text.count('"loss"') >= steps and text.count('"split"') >= evaluations:
                return self
            time.sleep(0.01)
        pytest.fail(f"step {steps} never came: {self.said}")

    def rank(self, number):
        """The process of a rank."""
        for process in self.processes:
            top = psutil.Process(process.pid)
            for child in (top, *top.children(recursive=True)):
                if child.environ().get("RANK") == str(number) and str(TRAIN) in child.cmdline():
                    return child
        pytest.fail(f"no rank {number}")

    def end(self, timeout=200):
        """The exit codes; a process that does not end is a failure."""
        deadline = time.monotonic() + timeout
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        finally:
            for p in self.processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    known = {}

    def of(how):
        if str(how) not in known:
            launched = Launched(how, tmp_path_factory.mktemp("undisturbed"))
            assert set(launched.end()) == {0}, launched.said
            known[str(how)] = content(launched.run)
        return known[str(how)]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank"), [(DDP, 0), (DDP, 1), (ZERO2, 1)], ids=["ddp-0", "ddp-1", "zero2-1"]
)
def test_killed_at_any_step_the_same_command_gives_the_same_bits(undisturbed, how, rank, tmp_path):
    expected = undisturbed(how)
    launched = Launched(how, tmp_path)
    launched.until(random.Random(f"{how}{rank}").randrange(2, 25)).rank(rank).kill()
    assert launched.end() != [0]
    assert not (launched.run / "result.json").exists()
    again = Launched(how, tmp_path)
    assert again.end() == [0], again.said
    assert "continuing" in again.said
    assert content(again.run) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "sent", "rank"), [(2, signal.SIGTERM, 1), (3, signal.SIGUSR2, 0)]
)
def test_a_signal_to_one_process_saves_and_ends_all(undisturbed, processes, sent, rank, tmp_path):
    """As a scheduler sends it some time before it kills; here to one process alone."""
    expected = undisturbed(processes)
    launched = Launched(processes, tmp_path, "save.every_minutes=10")
    launched.until(12).rank(rank).send_signal(sent)
    assert launched.end(timeout=30) == [75] * processes, launched.said
    assert launched.said.count("the same command continues") == 1
    (saved,) = (launched.run / "checkpoints").glob("step-*")
    again = Launched(processes, tmp_path, "save.every_minutes=10")
    assert set(again.end()) == {0}, again.said
    assert f"after step {int(saved.name[5:])}" in again.said
    assert content(again.run) == expected


@pytest.mark.slow
def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(undisturbed, tmp_path):
    """The evaluation of one image at a time takes long; it is given up, and made up for."""
    slow = ["engine.micro_batch=1", "save.every_minutes=10", "length.steps=10"]
    launched = Launched(1, tmp_path, *slow)
    launched.until(10).rank(0).send_signal(signal.SIGTERM)
    assert launched.end(timeout=30) == [75], launched.said
    assert [line for line in lines(launched.run) if line.get("split") == "validation"] == []
    again = Launched(1, tmp_path, *slow)
    assert again.end() == [0], again.said
    assert [line["step"] for line in lines(again.run) if line.get("split") == "validation"] == [10]


@pytest.mark.slow
def test_a_run_may_go_on_with_other_processes_and_engines(tmp_path):
    """Some steps with three processes, some under ZeRO-3 with two, and the rest with one."""
    how = [*CONVNET, "eval.untrained=false"]
    expected = Launched(1, tmp_path / "alone", *how)
    assert expected.end() == [0], expected.said
    for processes, step in ((3, 6), (ZERO3, 14)):
        launched = Launched(processes, tmp_path / "parts", *how)
        launched.until(step).rank(0).send_signal(signal.SIGTERM)
        assert 0 not in launched.end(), launched.said
    rest = Launched(1, tmp_path / "parts", *how)
    assert rest.end() == [0], rest.said
    assert losses(rest.run) == pytest.approx(losses(expected.run), rel=1e-4)
    before, after = (load_file(x.run / "model.safetensors") for x in (expected, rest))
    assert all((before[k] - after[k]).abs().max() < 1e-3 for k in before)
