"""Losses of proxies and the batches that their tests share."""

import torch

from dml.gpw import PROXY_LOSSES, make_loss

# Parameters with which every term matters on small batches.
LIVELY = {
    "proxy_nca": {"tau": 0.5, "own_proxy": True},
    "proxy_anchor": {"alpha": 4.0, "delta": 0.1},
    "normalised_softmax": {"tau": 0.25},
    "arcface": {"s": 6.0, "margin": 0.5},
}
VARIANTS = [(name, LIVELY[name]) for name in PROXY_LOSSES]
VARIANTS += [
    ("proxy_nca", {"tau": 1.0, "own_proxy": False}),
    ("arcface", {"s": 3.0, "margin": 2.0}),
    ("arcface", {"s": 70.0, "margin": 0.5}),  # exponents so large that they are shifted
]
IDS = [f"{name}-{'-'.join(map(str, p.values()))}" for name, p in VARIANTS]


def make(variant):
    name, parameters = variant
    return make_loss(name, **parameters)


def splits(m=60):
    """Batches and numbers of classes that are awkward to divide among 2, 3 or 4 processes, each
    (labels, classes)."""
    generator = torch.Generator().manual_seed(0)
    row = torch.arange(m)
    return {
        "classes without samples": (torch.randint(14, (m,), generator=generator), 17),
        "fewer classes than processes": (row % 2, 2),
        "classes on both sides of a border": (torch.tensor([5, 6, 8, 9, 11, 12])[row % 6], 18),
        "one class": (torch.full((m,), 7), 16),
        "all classes have one owner": (row % 4, 40),
        "every sample has its class": (m - 1 - row, m),
    }
