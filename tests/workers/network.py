"""The small network and the batches of the distributed tests."""

import os
import sys

import torch
from torch import nn
from torch.nn.functional import normalize


class Network(nn.Module):
    def __init__(self, dropout=0.0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8)]
        self.layers = nn.Sequential(*layers).to(dtype)

    def forward(self, x):
        return normalize(self.layers(x), dim=1)


def inputs(labels, dtype=torch.float64, seed=0):
    """An input for every label: noise around a direction of its class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(2000, 12, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), 12, generator=generator, dtype=torch.float64)
    return (centres[labels] + noise).to(dtype)


def mixed_labels(m=60, seed=0):
    """Classes scattered over the batch, and so over the processes; one with a single sample."""
    labels = torch.randint(14, (m,), generator=torch.Generator().manual_seed(seed))
    labels[m // 3] = 1000
    return labels


def splits(m=60):
    """Adversarial ways to divide a batch among processes, for W = 2, 3 and 4."""
    pairs = torch.arange(m) // 2
    return {
        "classes across processes": torch.arange(m) % (m // 2),
        "one process without positives": torch.where(torch.arange(m) < m // 2, pairs, pairs * 0)
        + torch.where(torch.arange(m) < m // 2, torch.zeros(m), 500 + torch.arange(m)).long(),
        "no positives at all": torch.arange(m),
        "one class": torch.zeros(m, dtype=torch.long),
        "one process alone has a class": torch.where(torch.arange(m) < m // 4, 0, pairs + 1),
    }


def own(x, rank, size):
    b = len(x) // size
    return x[rank * b : (rank + 1) * b]


def leave(accelerator):
    """End a worker after its results are written, without the interpreter's shutdown: during that, the
    threads of gloo sometimes abort the process ("terminate called without an active exception", seen
    in 2 of about 200 runs on a loaded machine)."""
    accelerator.wait_for_everyone()
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)
