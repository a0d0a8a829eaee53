"""How a run is saved, and found again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dml.config import Config
from dml.distributed.full_state import read_slots, read_weights, write_slots
from dml.distributed.processes import settle_buckets
from dml.distributed.team import Team
from dml.errors import CheckpointError, RunError
from dml.models import Embedder
from dml.run_folder import checkpoint
from dml.run_folder.checkpoint import Checkpoint
from dml.run_folder.folder import refuse_shorter, settings_digest, sound_result
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress

CHECKPOINTS = "checkpoints"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


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
    return team.from_first(last)


def restore(
    team: Team, last: Checkpoint | None, model: Embedder, optimizer: Optimizer
) -> tuple[Any, Any, Progress]:
    """The model and the optimizer as accelerate wraps them, in the state of the last checkpoint, and
    where the run stands. Without a checkpoint they start as they are."""
    progress = Progress(**last.state["progress"]) if last else Progress()
    if last:
        with team.together():
            load_weights(model, last)
        team.say(f"resuming after step {progress.step:,}")
    size = model.spec.size
    wrapped, optimizer = team.accelerator.prepare(model, optimizer)
    if last:
        write_slots(team.accelerator, wrapped, optimizer, last.tensors[OPTIMIZER], progress.step)
    images = torch.zeros(2, size, size, 3, dtype=torch.uint8, device=team.device)
    settle_buckets(wrapped, images)
    return wrapped, optimizer, progress


def load_weights(model: Embedder, last: Checkpoint) -> None:
    try:
        model.load_state_dict(last.tensors[MODEL])
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{last.folder} does not fit the model ({str(error).splitlines()[-1].strip()}); resume "
            "with the version that wrote it, or set run.name to another name"
        ) from None


class Saver:
    """Saves a run. All processes call it at the same time; the first one writes.

    step: that of the last checkpoint.
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
    ) -> None:
        self.team, self.root, self.origin = team, folder / CHECKPOINTS, origin
        self.model, self.optimizer = model, optimizer
        self.progress, self.journal = progress, journal
        self.step, self.time = progress.step, time.monotonic()

    def age(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self.time

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one; at step 0 there is nothing to save."""
        progress, accelerator = self.progress, self.team.accelerator
        with self.team.together():
            progress.metrics_size = self.journal.size()
        if progress.step not in (0, self.step):
            weights = read_weights(accelerator, self.model)
            slots = read_slots(accelerator, self.model, self.optimizer)
            with self.team.together():
                if self.team.first:
                    files = {MODEL: weights, OPTIMIZER: slots}
                    checkpoint.write_step(self.root, self.state(), files)
        self.step, self.time = progress.step, time.monotonic()

    def save_best(self) -> None:
        """Write the weights of this step, the best so far by the validation classes."""
        weights = read_weights(self.team.accelerator, self.model)
        with self.team.together():
            if self.team.first:
                name = checkpoint.best_name(self.progress.step)
                checkpoint.write(self.root, name, self.state(), {MODEL: weights})

    def best(self) -> dict[str, Tensor]:
        """The weights that `save_best` wrote last."""
        weights: dict[str, Tensor] = {}
        with self.team.together():
            if self.team.first:
                name = checkpoint.best_name(self.progress.best_step)
                weights = checkpoint.read(self.root / name).tensors[MODEL]
        return self.team.from_first(weights)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "best": self.progress.best_step,
            **asdict(self.origin),
            "progress": asdict(self.progress),
        }
