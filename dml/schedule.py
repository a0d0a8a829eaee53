"""What is due at a step: pure functions of the config, so there is nothing to resume."""

import math
from typing import Literal

from dml.config import Eval, Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The backbone's learning rate in update `step` (the first is 0) of a run of `steps`.

    Warm-up is linear. step: times gamma at every milestone. cosine: from the end of the warm-up to
    zero at the end of the run.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "step":
        return optim.lr * optim.gamma ** sum(step >= milestone for milestone in optim.milestones)
    if optim.schedule == "cosine":
        done = (step - optim.warmup_steps) / (steps - optim.warmup_steps)
        return optim.lr * (1 + math.cos(math.pi * done)) / 2
    return optim.lr


def evaluation_due(eval: Eval, step: int, steps: int) -> Literal["validation", "test"] | None:
    """Which classes to look at after `step` updates of a run of `steps`. The test classes are looked
    at in the end, whatever this says."""
    if step == 0:
        return "test" if eval.untrained else None
    on_the_way = eval.every_steps is not None and step % eval.every_steps == 0
    if eval.validation_classes:
        return "validation" if on_the_way or step == steps else None
    return "test" if on_the_way and step < steps else None
