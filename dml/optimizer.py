"""The optimizer of a run, and its learning rate."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from dml.config import Optim
from dml.models import Embedder


def make_optimizer(optim: Optim, model: Embedder) -> Optimizer:
    """Two groups of parameters, each with its own learning rate: backbone and head."""
    groups: list[dict[str, Any]] = [
        {"params": list(model.backbone.parameters()), "lr_factor": 1.0},
        {"params": list(model.head.parameters()), "lr_factor": optim.head_lr_factor},
    ]
    if optim.name == "sgd":
        return SGD(groups, optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)
    kind = Adam if optim.name == "adam" else AdamW
    return kind(groups, optim.lr, weight_decay=optim.weight_decay)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
