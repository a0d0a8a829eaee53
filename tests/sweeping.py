"""Small sweeps for the tests, started as a user would."""

import json
import subprocess
import sys

import yaml
from fleet import ROOT, WORKERS, environment
from forks import Forked
from pictures import few_icons

ICONS = few_icons()
SETTINGS = {
    "data.shards": str(ICONS),
    "data.workers": 0,
    "batch.classes": 16,
    "model.embedding_size": 32,
    "optim.lr": 1e-4,
    "optim.schedule": "cosine",
    "length.steps": 30,
    "run.log_steps": 1,
    "eval.every_steps": None,
    "eval.untrained": False,
}


class OnThisMachine(Forked):
    """launch/slurm.py with runs on this machine: it is a fork, as are its processes. With more of the
    interface of Popen."""

    def __init__(self, command, env, log):
        log.write_text("")
        self.log = log
        super().__init__([WORKERS / "launching.py", *command], ROOT, env, log, log)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.wait()

    def communicate(self, timeout):
        self.wait(timeout)
        return self.log.read_text(), None


class Sweeping:
    """A sweep with one named point per run, and its folder. tune: its search. forked: False if the time
    that a launcher takes to start matters."""

    def __init__(self, folder, points, slurm=None, env=None, tune=None, forked=True, **settings):
        folder.mkdir(exist_ok=True)
        self.folder, self.env = folder, {**environment(), **(env or {})}
        self.forked, self.started = forked, 0
        self.runs = {name: folder / "runs" / "study" / f"{name}-seed0" for name in points}
        tree = {
            "base": str(ROOT / "configs" / "icons_mini.yaml"),
            "set": {**SETTINGS, "run.dir": str(folder / "runs"), **settings},
            "grid": {"point": points},
            "slurm": {"minutes": 10, **(slurm or {})},
            **({"tune": tune} if tune else {}),
        }
        self.path = folder / "study.yaml"
        self.path.write_text(yaml.safe_dump(tree, sort_keys=False))

    def start(self, *arguments):
        command = [ROOT / "launch/slurm.py", "--sweep", self.path, *arguments]
        if "local" in arguments and self.forked:
            self.started += 1
            return OnThisMachine(command, self.env, self.folder / f"{self.started}.log")
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *arguments, code=0):
        """The output of launch/slurm.py."""
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=240)
        assert process.returncode == code, said
        assert "Traceback" not in said, said
        return said

    def states(self):
        """Run -> its state, by --status."""
        table, _, _ = self("--status").partition("\n\n")
        rows = [line.split() for line in table.splitlines()[1:]]
        return {row[0].removesuffix("-seed0"): row[1] for row in rows}

    def steps(self, name, file="metrics.jsonl"):
        """Every training step in a file, in its order."""
        path = self.runs[name] / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line["step"] for line in found if "split" not in line]

    def content(self, name):
        """The files that must be equal to the bit."""
        run = self.runs[name]
        return (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()

    def losses(self, name):
        text = (self.runs[name] / "metrics.jsonl").read_text()
        found = map(json.loads, text.splitlines())
        return [line["loss"] for line in found if "loss" in line]

    def result(self, name):
        return json.loads((self.runs[name] / "result.json").read_bytes())
