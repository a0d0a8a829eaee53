"""The small network and the batches of the distributed tests."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[1]))
from batches import IDS


class Network(nn.Module):
    def __init__(self, dropout=0.0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8)]
        self.layers = nn.Sequential(*layers).to(dtype)

    def forward(self, x):
        return normalize(self.layers(x), dim=1)


class TwoTowers(nn.Module):
    """Two encoders in one module, which is wrapped once."""

    def __init__(self):
        super().__init__()
        self.x, self.y = Network(), Network()
        with torch.no_grad():
            for p in self.y.parameters():
                p.mul_(1.3).add_(0.02)

    def forward(self, x, y):
        return self.x(x), self.y(y)


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


def tower_labels():
    """Labels of two towers: every split for both, and others."""
    mixed = mixed_labels()
    both = {split: (labels, labels) for split, labels in splits().items()}
    return {
        "mixed": (mixed, mixed_labels(seed=1)),
        **both,
        "other classes": (mixed, mixed + 7),
        "other sizes": (mixed, mixed_labels(m=84, seed=1)),
    }


def tower_cases(case):
    """(name of a loss, micro-batches): all losses on mixed labels, on the others those without mining, and
    multi-similarity, the first."""
    if case != "mixed":
        return [(name, 1) for name in IDS if "-mined" not in name]
    return [*((name, 1) for name in IDS), (IDS[0], 3)]


def remembered(steps=3):
    """Batches of 90 images that come again: labels, identities and inputs of each."""
    labels = mixed_labels(m=90)
    everything = inputs(labels)
    for step in range(steps):
        ids = torch.randperm(90, generator=torch.Generator().manual_seed(step))[:60]
        yield labels[ids], ids, everything[ids] + 0.1 * step


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
