"""The runs that are disturbed: the same short training, started in five ways."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sweeping
import yaml
from fleet import ACCELERATE as LAUNCH
from fleet import ROOT, WORKERS, free_port, ranks

from chaos.judge import Skip
from chaos.running import TRAIN, Watched

CONFIG = ROOT / "configs" / "icons_mini.yaml"
LAUNCHING = [str(WORKERS / "launching.py")]
STEPS = 30
SETTINGS = {
    **sweeping.SETTINGS,
    "data.size": 16,
    "length.steps": STEPS,
    "eval.every_steps": 10,
    "eval.validation_classes": 0.1,
    "eval.untrained": True,
}
RARELY = 10  # minutes between checkpoints: only after a signal, and at the end

Settings = Mapping[str, object]


def as_text(settings: Settings) -> list[str]:
    """As --set takes them."""
    plain = {k: v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
    return [f"{key}={value}" for key, value in plain.items()]


def training(settings: Settings) -> list[str]:
    return [str(TRAIN), "--config", str(CONFIG), "--set", *as_text({**SETTINGS, **settings})]


@dataclass(frozen=True)
class Setup:
    """launcher: None if the processes are started one by one."""

    name: str
    processes: int
    launcher: str | None = None

    def run_folder(self, folder: Path) -> Path:
        """Where the run is, if its trial uses this folder."""
        return folder / "runs" / ("study/a-seed0" if self.launcher == "sweep" else "run")

    def start(
        self,
        folder: Path,
        log: Path,
        settings: Settings,
        env: Mapping[str, str] | None = None,
        *,
        forked: bool = False,
    ) -> Watched:
        """forked: only if neither the imports of the processes matter nor what is read before them."""
        folder.mkdir(parents=True, exist_ok=True)
        watched, env = Watched(log), env or {}
        settings = {"run.dir": str(folder / "runs"), **settings}
        variables: list[dict[str, str]] = [{}]
        if self.launcher == "sweep":
            words = [*LAUNCHING, *self.sweep(folder, settings)]
        elif self.launcher:
            config = ROOT / "configs" / "accelerate" / f"{self.launcher}.yaml"
            words = [*map(str, LAUNCH), "--config_file", str(config)]
            words += ["--num_processes", "2", "--main_process_port", str(free_port())]
            words += training({**settings, "run.name": "run"})
            variables = [{"DS_ACCELERATOR": "cpu"}]
        else:
            words = training({**settings, "run.name": "run"})
            variables = ranks(self.processes) if self.processes > 1 else variables
        for each in variables:
            if forked:
                watched.fork_anew(words, {**each, **env})
            else:
                plain = words[len(LAUNCHING) :] if self.launcher else words
                watched.start([sys.executable, *plain], {**each, **env})
        return watched

    def sweep(
        self, folder: Path, settings: Settings, points: tuple[str, ...] = ("a",)
    ) -> list[str]:
        """The words that start a sweep of the same run, under one or several names."""
        path = folder / "study.yaml"
        if not path.exists():
            tree = {
                "base": str(CONFIG),
                "set": {**SETTINGS, **settings},
                "grid": {"point": {point: {} for point in points}},
                "slurm": {"minutes": 10, "processes_per_node": self.processes},
            }
            path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return [str(ROOT / "launch/slurm.py"), "--sweep", str(path), "--executor", "local"]


ONE = Setup("one process", 1)
TWO = Setup("two processes", 2)
ACCELERATE = Setup("accelerate", 2, "cpu_x2")
ZERO2 = Setup("ZeRO-2", 2, "zero2")
SWEEP = Setup("local sweep", 1, "sweep")
SETUPS = (ONE, TWO, ACCELERATE, ZERO2, SWEEP)


def refuse_missing(setup: Setup) -> None:
    if setup is ZERO2 and importlib.util.find_spec("deepspeed") is None:
        raise Skip("DeepSpeed is not installed")


# The bytes of a result depend on the processes, not on what started them.
LIKE = {ACCELERATE: TWO, SWEEP: ONE}
