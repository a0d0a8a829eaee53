"""How a run is saved, and found again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dml.config import Config
from dml.data.pair import inputs_of
from dml.distributed.full_state import (
    Named,
    read_slots,
    read_weights,
    send_weights,
    slot_keys,
    write_slots,
)
from dml.distributed.learned_state import (
    Learning,
    learned_keys,
    learned_shape,
    read_learned,
    write_learned,
)
from dml.distributed.processes import settle_buckets
from dml.distributed.team import Team
from dml.errors import CheckpointError, RunError
from dml.gpw import Memory
from dml.models import Embedder, TwoTowers
from dml.run_folder import checkpoint
from dml.run_folder.background import Background
from dml.run_folder.checkpoint import Checkpoint
from dml.run_folder.folder import refuse_shorter, settings_digest, sound_result
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress

CHECKPOINTS = "checkpoints"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
LOSS, MEMORY = "loss.safetensors", "memory.safetensors"


@dataclass(frozen=True)
class Learned:
    """What the loss learns, and its optimizer."""

    loss: Learning
    optimizer: Optimizer


@dataclass(frozen=True)
class Origin:
    """What a checkpoint comes from: checksums of the settings and of the training data."""

    settings: str
    shards: str

    @classmethod
    def of(cls, config: Config, shards: str) -> Origin:
        return cls(settings_digest(config), shards)


def last_checkpoint(team: Team, folder: Path, origin: Origin, steps: int) -> Checkpoint | None:
    """The last whole checkpoint; damaged later ones are named and skipped. Only the first process
    looks: the others need not see its folder. steps: the length of the run."""
    last, damaged = checkpoint.read_last(folder / CHECKPOINTS) if team.first else (None, [])
    for sentence in damaged:
        team.say(f"a damaged checkpoint is skipped: {sentence}")
    with team.together():
        if last is not None and last.state.get("settings", origin.settings) != origin.settings:
            raise RunError(
                f"the checkpoints of {folder} were trained with other settings; put back the folder "
                "they belong to, or set run.name to another name"
            )
        if last is not None and last.state["shards"] != origin.shards:
            raise RunError(
                f"{folder} was trained on other shards; set data.shards to those it began with, or "
                "run.name to another name"
            )
        if last is not None:
            refuse_shorter(folder, last.state["step"], steps)
        elif team.first and sound_result(folder) is not None:
            raise RunError(
                f"{folder} has a result and no checkpoint to train it longer from; set run.name to "
                "another name, or put its checkpoints back"
            )
    # The tensors stay there: `restore` sends them one by one.
    known = team.from_first(last and replace(last, tensors={}))
    return last if team.first else known


def restore(
    team: Team,
    last: Checkpoint | None,
    model: Embedder | TwoTowers,
    optimizer: Optimizer,
    learned: Learned | None = None,
) -> tuple[Any, Any, Progress]:
    """The model and the optimizer as accelerate wraps them, in the state of the last checkpoint, and
    where the run stands. Without a checkpoint they start as they are. What the loss learns, too."""
    progress = Progress(**last.state["progress"]) if last else Progress()
    if last:
        with team.together():
            if team.first:
                check_fits(model, optimizer, learned, last)
        send_weights(team.accelerator, model, last.tensors.get(MODEL, {}))
        team.say(f"resuming after step {progress.step:,}")
    spec = model.spec
    wrapped, optimizer = team.accelerator.prepare(model, optimizer)
    if last:
        slots = last.tensors.get(OPTIMIZER, {})
        write_slots(team.accelerator, wrapped, optimizer, slots, progress.step)
        if learned is not None:
            state = last.tensors.get(LOSS, {})
            write_learned(team.accelerator, learned.loss, learned.optimizer, state, progress.step)
    batch = torch.zeros(2, *spec.shape, dtype=spec.tensor_dtype, device=team.device)
    settle_buckets(wrapped, inputs_of(spec, batch))
    return wrapped, optimizer, progress


def check_fits(
    model: nn.Module, optimizer: Optimizer, learned: Learned | None, last: Checkpoint
) -> None:
    try:
        model.load_state_dict(last.tensors[MODEL])
        for name in slot_keys(model, optimizer):
            last.tensors[OPTIMIZER][name]
        if learned is not None:
            for key in learned_keys(learned.loss, learned.optimizer):
                found, expected = last.tensors[LOSS][key].shape, learned_shape(learned.loss, key)
                if found != expected:
                    raise KeyError(f"{key} is {tuple(found)} and must be {tuple(expected)}")
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{last.folder} does not fit the model ({str(error).splitlines()[-1].strip()}); resume "
            "with the version that wrote it, or set run.name to another name"
        ) from None


def restore_memory(team: Team, last: Checkpoint | None, memory: Memory) -> None:
    """The cross-batch memory as the last checkpoint has it, on all processes."""
    if last is None:
        return
    with team.together():
        if team.first and MEMORY not in last.tensors:
            raise CheckpointError(
                f"{last.folder} has no {MEMORY}; put it back, or set run.name to another name"
            )
    memory.load(team.from_first(last.tensors.get(MEMORY, {})), team.device)


class Saver:
    """Saves a run. All processes call it at the same time; the first one writes, in a thread, while the
    training goes on. What cannot be written (a full disk) is raised at the team's next meeting.
    """

    def __init__(
        self,
        team: Team,
        folder: Path,
        origin: Origin,
        model: nn.Module,
        optimizer: Optimizer,
        progress: Progress,
        journal: Journal,
        learned: Learned | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory
        self.team, self.root, self.origin = team, folder / CHECKPOINTS, origin
        self.model, self.optimizer, self.learned = model, optimizer, learned
        self.progress, self.journal = progress, journal
        self.started = self.written = progress.step
        self.time = time.monotonic()
        self.background = Background(team.note)

    @property
    def step(self) -> int:
        """The step of the last checkpoint that is on disk."""
        self.background.wait()
        return self.written

    def age(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self.time

    def save(self) -> None:
        """Begin a checkpoint of this step, unless there is one; at step 0 there is nothing to save."""
        step = self.progress.step
        self.settle()
        if step not in (0, self.started):
            weights = read_weights(self.team.accelerator, self.model)
            slots = read_slots(self.team.accelerator, self.model, self.optimizer)
            of_loss: Named = {}
            if self.learned is not None:
                loss, optimizer = self.learned.loss, self.learned.optimizer
                of_loss = read_learned(self.team.accelerator, loss, optimizer)
            if self.team.first:
                self.progress.metrics_size = self.journal.length()
                files = {MODEL: copied(weights), OPTIMIZER: copied(slots)}
                files |= {LOSS: of_loss} if of_loss else {}
                if self.memory is not None:  # the same on all processes
                    files[MEMORY] = copied(self.memory.state())
                self.background.start(partial(self.write, self.state(), files))
        self.started, self.time = step, time.monotonic()

    def write(self, state: dict[str, Any], files: dict[str, Named]) -> None:
        self.journal.sync()  # the metrics that the checkpoint knows of are on disk before it is
        checkpoint.write_step(self.root, state, files)
        self.written = state["step"]

    def save_best(self) -> None:
        """Begin to write the weights of this step, the best so far by the validation classes."""
        self.settle()
        weights = read_weights(self.team.accelerator, self.model)
        if self.team.first:
            name, files = checkpoint.best_name(self.progress.step), {MODEL: copied(weights)}
            self.background.start(partial(checkpoint.write, self.root, name, self.state(), files))

    def best(self) -> Named:
        """The weights that `save_best` wrote last, on the first process."""
        self.settle()
        weights: Named = {}
        with self.team.together():
            if self.team.first:
                name = checkpoint.best_name(self.progress.best_step)
                weights = checkpoint.read(self.root / name).tensors[MODEL]
        return weights

    def settle(self) -> None:
        """Return when all that was saved is on disk; if that failed, all processes raise why."""
        with self.team.together():
            self.background.wait()

    def close(self) -> None:
        self.background.wait()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "best": self.progress.best_step,
            **asdict(self.origin),
            "progress": asdict(self.progress),
        }


def copied(tensors: Named) -> Named:
    """The tensors as they are now, in the machine's memory: the training goes on to change them."""
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
