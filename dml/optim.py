"""The optimizer of a run, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dml.config import Optim
from dml.models import Embedder


def make_optimizer(optim: Optim, model: nn.Module) -> Optimizer:
    """Two groups of parameters, each with its own learning rate: backbone and head, of one encoder or of
    two. `fused` reads and writes every number once, and on a GPU takes one kernel for many parameters."""
    encoders = [each for each in model.modules() if isinstance(each, Embedder)]
    groups: list[dict[str, Any]] = [
        {"params": [p for each in encoders for p in each.backbone.parameters()], "lr_factor": 1.0},
        {
            "params": [p for each in encoders for p in each.head.parameters()],
            "lr_factor": optim.head_lr_factor,
        },
    ]
    groups = [group for group in groups if group["params"]]  # features come without a backbone
    return of_groups(optim, groups, optim.weight_decay)


def make_loss_optimizer(optim: Optim, loss: nn.Module) -> Optimizer | None:
    """The optimizer of what the loss learns; None if it learns nothing. It steps beside that of the
    model, so no wrapper of the model knows of it.

    There is no weight decay. A proxy is used at unit length, so decay would not change the loss. And where
    a proxy has nearly no gradient, Adam would turn its decay into steps of full length, down to zero.
    """
    parameters = list(loss.parameters())
    if not parameters:
        return None
    return of_groups(optim, [{"params": parameters, "lr_factor": optim.proxy_lr_factor}], 0.0)


def of_groups(optim: Optim, groups: list[dict[str, Any]], decay: float) -> Optimizer:
    if optim.name == "sgd":
        return SGD(groups, optim.lr, momentum=optim.momentum, weight_decay=decay, fused=True)
    kind = Adam if optim.name == "adam" else AdamW
    return kind(groups, optim.lr, weight_decay=decay, fused=True)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


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
