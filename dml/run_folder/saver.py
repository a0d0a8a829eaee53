"""Where a run stands, and how it is kept: the checkpoints of a run that is on its way."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dml.distributed.full_state import read_slots, read_weights
from dml.distributed.processes import from_first, together
from dml.errors import CheckpointError, NotFiniteError, RunError
from dml.run_folder import checkpoint
from dml.run_folder.checkpoint import Checkpoint

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass
class Progress:
    """What is not here, the batches, crops and learning rates of every step, is a function of the
    config and the step."""

    step: int = 0  # updates done
    evaluated: int = -1  # the step that was evaluated last
    without_pairs: int = 0  # steps that found no informative pair
    best_step: int | None = None  # by the validation classes
    best_recall: float = -1.0
    stale: int = 0  # evaluations since
    untrained: dict[str, float] | None = None  # scores of the test classes at step 0
    seconds: float = 0.0
    metrics_size: int = 0  # bytes of metrics.jsonl

    def improves(self, recall: float) -> bool:
        """Note an evaluation of the validation classes; whether it is the best so far."""
        self.stale += 1
        if recall <= self.best_recall:
            return False
        self.best_step, self.best_recall, self.stale = self.step, recall, 0
        return True


def last_checkpoint(
    accelerator: Accelerator, root: Path, shards: str
) -> tuple[Checkpoint | None, list[str]]:
    """The last whole checkpoint, and a sentence for every later one that is damaged. Only the first
    process looks: the others need not see its folder. shards: the checksum of what is trained on."""
    last, damaged = checkpoint.read_last(root) if accelerator.is_main_process else (None, [])
    with together(accelerator, RunError):
        if last is not None and last.state["shards"] != shards:
            raise RunError(
                f"{root.parent} was trained on other shards; set data.shards to those it began "
                "with, or run.name to another name"
            )
    return from_first(accelerator, last), damaged


class Keeper:
    """Saves a run. All processes call it at the same time; the first one writes."""

    def __init__(
        self,
        accelerator: Accelerator,
        root: Path,
        shards: str,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
    ) -> None:
        self.accelerator, self.root, self.shards = accelerator, root, shards
        self.model, self.optimizer = model, optimizer
        self.step, self.time = step, time.monotonic()

    def age(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self.time

    def save(self, progress: Progress) -> None:
        """The checkpoint of this step, unless there is one (before the first there is nothing)."""
        if progress.step not in (0, self.step):
            weights = read_weights(self.accelerator, self.model)
            slots = read_slots(self.accelerator, self.model, self.optimizer)
            with together(self.accelerator, CheckpointError, NotFiniteError):
                if self.accelerator.is_main_process:
                    files = {MODEL: weights, OPTIMIZER: slots}
                    checkpoint.write_step(self.root, self.state(progress), files)
        self.step, self.time = progress.step, time.monotonic()

    def save_best(self, progress: Progress) -> None:
        weights = read_weights(self.accelerator, self.model)
        with together(self.accelerator, CheckpointError, NotFiniteError):
            if self.accelerator.is_main_process:
                name = checkpoint.best_name(progress.step)
                checkpoint.write(self.root, name, self.state(progress), {MODEL: weights})

    def best(self, step: int) -> dict[str, Tensor]:
        """The weights that `save_best` has kept of a step."""
        weights: dict[str, Tensor] = {}
        with together(self.accelerator, CheckpointError):
            if self.accelerator.is_main_process:
                weights = checkpoint.read(self.root / checkpoint.best_name(step)).tensors[MODEL]
        return from_first(self.accelerator, weights)

    def state(self, progress: Progress) -> dict[str, Any]:
        return {
            "step": progress.step,
            "best": progress.best_step,
            "shards": self.shards,
            "progress": asdict(progress),
        }
