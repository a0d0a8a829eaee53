"""What trials share: undisturbed runs to compare with, and inputs that are made once."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from cluster.two_nodes import TwoNodes, missing
from fleet import ROOT
from forks import import_for_forks
from pictures import make_folder

from chaos.faults import Moment
from chaos.judge import FINISHED, INTERRUPTED, Skip, Violation, content, last_lines
from chaos.running import Watched, own_shared_memory, shared_memory
from chaos.setups import (
    LAUNCHING,
    LIKE,
    ONE,
    RARELY,
    SWEEP,
    Settings,
    Setup,
    refuse_missing,
    training,
)
from chaos.shim import compile_shim

WHOLE_RUN = 280  # seconds after which a run of some steps hangs; DeepSpeed's first start compiles
TINY = {
    "data.dataset": "folder",
    "batch.classes": 2,
    "batch.per_class": 2,
    "length.steps": 2,
    "eval.ks": [1],
    "eval.every_steps": None,
    "eval.validation_classes": 0,
    "eval.untrained": False,
}


class Lab:
    """folder: everything is made below it. As a context: cleaned up at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.set_num_threads(1)  # a fork of a process with a pool of threads would wait for them
        import_for_forks()
        self.stack = ExitStack()
        self.alone = own_shared_memory()  # whether all shared memory that is seen is ours
        self.references: dict[Setup, Path] = {}

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @cached_property
    def shim(self) -> Path:
        return compile_shim(self.folder)

    @cached_property
    def cluster(self) -> TwoNodes:
        """A real Slurm of two nodes."""
        reason = missing()
        if reason:
            raise Skip(reason)
        return self.stack.enter_context(TwoNodes(self.folder / "slurm"))

    def undisturbed(self, setup: Setup) -> Path:
        """The folder of a run that nothing disturbs."""
        refuse_missing(setup)
        setup = LIKE.get(setup, setup)
        if setup not in self.references:
            place = self.folder / "undisturbed" / setup.name.replace(" ", "-")
            log = self.folder / f"{place.name}.log"
            run = setup.start(place, log, {}, forked=True)
            run.end(prompt=None, hang=WHOLE_RUN)
            if set(run.codes) != {FINISHED}:
                raise Violation(
                    f"an undisturbed run ended with {run.codes}: {last_lines(run.said)}"
                )
            self.references[setup] = setup.run_folder(place)
        return self.references[setup]

    @cached_property
    def interrupted(self) -> Path:
        """The folder of a run of one process that was asked to leave in the middle."""
        place = self.folder / "interrupted"
        log, often = self.folder / "interrupted.log", {"save.every_minutes": 1e-6}
        run = ONE.start(place, log, often, forked=True)
        found = ONE.run_folder(place)
        Moment(17, 0).wait(run, found)
        os.kill(run.children[0].pid, signal.SIGTERM)
        run.end(prompt=None)
        if run.codes != [INTERRUPTED]:
            raise Violation(f"it cannot be interrupted: {run.codes}, {last_lines(run.said)}")
        return found

    @cached_property
    def tiny(self) -> tuple[Path, Path, Path]:
        """A folder of a few images, shards of them, and a run that was trained on them."""
        images, shards, runs = (self.folder / name for name in ("images", "shards", "runs"))
        make_folder(images, classes=4)
        self.program("shards/build.py", "folder", "--root", images, "--out", shards)
        self.program(*self.tiny_training(shards, runs))
        return images, shards, runs / "tiny"

    def tiny_training(self, shards: Path, runs: Path, **more: object) -> list[str]:
        """The words that train a few steps on small shards."""
        own = {"data.shards": str(shards), "run.dir": str(runs), "run.name": "tiny"}
        return training({**TINY, **own, **more})

    @cached_property
    def embedded(self) -> Path:
        """The embeddings of the few images by the small run."""
        images, _, run = self.tiny
        out = self.folder / "embedded"
        self.program("dml/embed.py", run, images, "--out", out, "--workers", 0)
        return out

    def two_points(self, folder: Path) -> Settings:
        """The settings of a small sweep with the runs a and b."""
        return {**TINY, "data.shards": str(self.tiny[1]), "run.dir": str(folder / "runs")}

    @cached_property
    def swept(self) -> Path:
        """The folder of a small sweep: a is finished, b was started and stopped."""
        place = self.folder / "swept"
        place.mkdir()
        words = SWEEP.sweep(place, self.two_points(place), ("a", "b"))
        run = Watched(self.folder / "swept.log")
        run.fork_anew([*LAUNCHING, *words], {})
        self.finish(run, "a sweep")
        study = place / "runs" / "study"
        (study / "b-seed0" / "result.json").unlink()
        (study / "b-seed0" / "restarts.json").write_text('{"step": 1, "times": 2, "code": 1}\n')
        return study

    def program(self, script: str, *words: object) -> None:
        run = Watched(self.folder / f"{Path(script).stem}.log")
        run.fork([ROOT / script, *words])
        self.finish(run, script)

    def finish(self, run: Watched, what: str) -> None:
        run.end(prompt=None, hang=WHOLE_RUN)
        if run.codes != [FINISHED]:
            raise Violation(f"{what} ended with {run.codes}: {last_lines(run.said)}")


class Trial:
    """One trial: its random numbers, its folder, its processes. As a context: all of them gone."""

    def __init__(self, lab: Lab, kind: str, seed: int) -> None:
        self.lab, self.name = lab, f"{kind}:{seed}"
        self.rng = random.Random(self.name)
        self.folder = lab.folder / "trials" / f"{kind}-{seed}"
        self.setup_name, self.notes, self.started = "", [], []
        self.early = False  # whether something happens while the processes import
        self.stack = ExitStack()

    def __enter__(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for run in self.started:
            run.kill()
        self.stack.close()
        left = shared_memory() if self.lab.alone else set()
        for name in left:
            Path("/dev/shm", name).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        if left and kind is None:
            raise Violation(f"shared-memory segments are left: {', '.join(sorted(left))}")

    def note(self, text: object) -> None:
        """What is done to the run, for the report of a violation."""
        self.notes.append(str(text))

    def choose(self, *setups: Setup) -> Setup:
        setup = self.rng.choice(setups)
        refuse_missing(setup)
        self.setup_name = setup.name
        self.note(setup.name)
        return setup

    def settings(self, workers: tuple[int, ...] = (0, 1, 2)) -> Settings:
        """How many loader workers, and how often a checkpoint: after every step, now and then, or only
        when the run is asked to leave."""
        drawn = {
            "data.workers": self.rng.choice(workers),
            "save.every_minutes": self.rng.choice([1e-6, 0.003, RARELY]),
        }
        self.note(" ".join(f"{key}={value}" for key, value in drawn.items()))
        return drawn

    def log(self) -> Path:
        return self.folder / f"{len(self.started)}.log"

    def start(
        self,
        setup: Setup,
        settings: Settings,
        env: Mapping[str, str] | None = None,
        place: Path | None = None,
    ) -> Watched:
        """env: of the dynamic linker, which reads it when a process starts."""
        place, forked = place or self.folder, not (env or self.early)
        run = setup.start(place, self.log(), settings, env, forked=forked)
        self.started.append(run)
        return run

    def fork(self, script: str, *words: object, gigabytes: float | None = None) -> Watched:
        """Run one of our programs in a fork of the campaign, to its end."""
        run = Watched(self.log())
        self.started.append(run)
        run.fork([ROOT / script, *words], gigabytes)
        run.end(prompt=None)
        return run

    def expected(self, setup: Setup) -> dict[str, bytes]:
        return content(self.lab.undisturbed(setup))

    def disk(self, size: int) -> Path:
        """A file system of so many bytes."""
        place = self.folder / "disk"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            raise Skip("mounting a file system needs root")
        self.stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
        return place

    def remount(self, place: Path, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)
