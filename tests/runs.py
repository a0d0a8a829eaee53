"""Whole training runs for the tests: small ones, how to start and watch them, what they left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fleet import ACCELERATE, ROOT, environment, free_port, ranks, run, start
from forks import Forked
from pictures import few_icons

from launch.zero import deepspeed_variables

TRAIN = ROOT / "dml" / "train.py"
ICONS = few_icons()
BASE = [
    "--config",
    str(ROOT / "configs" / "icons_mini.yaml"),
    "--set",
    f"data.shards={ICONS}",
    "data.workers=0",
    "data.size=16",
    "batch.classes=16",
    "optim.lr=1e-4",
    "optim.schedule=cosine",
    "model.embedding_size=32",
    "length.steps=30",
    "run.log_steps=1",
    "eval.every_steps=null",
    "eval.untrained=false",
]


# A training process of its own takes all cores, and two threads that share small work on a busy machine can need
# several times the CPU time of one (69 and 14 s in one comparison, of EfficientNet-Lite0 in float64).
ONE_CORE = {"SLURM_CPUS_PER_TASK": "1"}


def train(processes, folder, *sets, timeout=280):
    """Train to the end; every process must exit with 0. Returns the run's folder."""
    run(TRAIN, processes, *BASE, f"run.dir={folder}", *sets, timeout=timeout)
    return Path(folder) / "icons_mini"


def train_several(processes, folder, runs, timeout=280, variables=None):
    """Several runs in the same processes: {name: settings} -> {name: [(exit code, stderr)]}, with an
    entry for every process. Run `name` is in folder/name."""
    lines = [
        {"port": free_port(), "arguments": [*BASE, f"run.dir={folder}", f"run.name={name}", *sets]}
        for name, sets in runs.items()
    ]
    plan = Path(folder) / f"runs-{processes}.json"
    plan.write_text(json.dumps(lines))
    found = {name: [] for name in runs}
    for process in start("several.py", processes, plan, timeout=timeout, variables=variables):
        assert process.returncode == 0, process.stderr
        said = process.stderr
        for name in runs:
            stderr, _, said = said.partition("exit code ")
            code, _, said = said.partition("\n")
            found[name].append((int(code), stderr))
    return found


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def scalars(run):
    """The names of the scalars in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(run)).Reload().Tags()["scalars"])


def result(run):
    return json.loads((run / "result.json").read_text())


def checkpoints(run):
    """The folders to resume from, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def content(run):
    """What must be the same to the bit."""
    return (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()


ON_CPU = {"DS_ACCELERATOR": "cpu"}


class Launched:
    """A run that a test watches and disturbs.

    how: arguments of `accelerate launch`; or a number of processes that are started without it, so
    that each has its own exit code; or "zero2" or "zero3", for two such processes under DeepSpeed.
    machines: a working folder per process. forked: False if the imports of a process matter. A launcher
    is a fork, too, and so are its processes.
    """

    def __init__(self, how, folder, *sets, machines=None, program=(TRAIN,), base=BASE, forked=True):
        self.run, self.log = Path(folder) / "icons_mini", Path(folder) / f"{time.monotonic_ns()}"
        Path(folder).mkdir(exist_ok=True)
        command = [*program, *base, f"run.dir={folder}", *sets]
        self.ranks = isinstance(how, int | str)
        if isinstance(how, int):
            variables = ranks(how)
        elif isinstance(how, str):
            zero = {**deepspeed_variables(how), **ON_CPU}
            variables = [{**rank, **zero} for rank in ranks(2)]
        else:
            command = [*ACCELERATE, "--main_process_port", free_port(), *how, *command]
            variables = [ON_CPU]
        self.processes = [
            Forked(command, cwd, environment(**more), self.log, self.log)
            if forked
            else self.start([sys.executable, *command], cwd, environment(**more))
            for more, cwd in zip(variables, machines or [ROOT] * len(variables), strict=True)
        ]

    def start(self, command, cwd, env):
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*map(str, command)],
                cwd=cwd,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self):
        return self.log.read_text()

    def wait_for(self, ready, what, seconds=100):
        """Until ready() is true; the run must not end before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            if ready():
                return self
            time.sleep(0.01)
        pytest.fail(f"{what} never came: {self.said}")

    def until(self, step):
        metrics = self.run / "metrics.jsonl"
        return self.wait_for(
            lambda: metrics.exists() and metrics.read_text().count('"loss"') >= step, f"step {step}"
        )

    def rank(self, number):
        """The process of a rank."""
        if self.ranks:
            return psutil.Process(self.processes[number].pid)
        top = psutil.Process(self.processes[0].pid)
        for child in top.children(recursive=True):
            if child.environ().get("RANK") == str(number) and str(TRAIN) in child.cmdline():
                return child
        pytest.fail(f"no rank {number}")

    def end(self, timeout=270):
        """The exit codes; a process that does not end is a failure. On a busy machine DeepSpeed's first
        launch compiles for minutes."""
        deadline = time.monotonic() + timeout
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        finally:
            for p in self.processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()
