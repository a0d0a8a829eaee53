"""Batches and losses that the tests share."""

import torch
from torch.nn.functional import normalize

from dml.catalogue import MINING_SETTLED
from dml.gpw import LOSSES, make_loss

# Hyper-parameters with which every term of every loss matters on the batches below: with the paper's
# beta = 50 and lam = 1 a negative weight is often 1e-12, and an error in it would not be noticed.
LIVELY = {
    "multi_similarity": {"alpha": 2.0, "beta": 10.0, "lam": 0.5, "eps": 0.1},
    "ms_weighting": {"alpha": 2.0, "beta": 10.0, "lam": 0.5},
    "ms_mining": {"eps": 0.1},
    "contrastive": {"lam": 0.2},
    "triplet": {"lam": 0.1},
    "lifted_structure": {"lam": 0.5, "tau": 0.4},
    "lifted_structure_star": {"alpha": 2.0, "beta": 10.0},
    "binomial_deviance": {"alpha": 2.0, "beta": 10.0, "lam": 0.5},
    "n_pairs": {"lam": -1.0, "tau": 0.7},  # some hinges open, some closed
    "nca": {"tau": 0.3},
    "histogram": {"bins": 21},
    "bin_lifted": {"alpha": 2.0, "beta": 10.0, "lam": 0.5},
    "recall_surrogate": {"tau": 0.1, "ks": (1, 2, 5), "taus": (1.0, 1.5, 4.0)},
    "smooth_ap": {"tau": 0.1},
    "supcon": {"tau": 0.3, "variant": "out"},
    "info_nce": {"tau": 0.3},
    "circle": {"m": 0.4, "gamma": 4.0},
    "margin": {"alpha": 0.2, "beta": 0.9, "dim": 8, "cutoff": 0.7, "nonzero_loss_cutoff": 1.3},
    "pairwise_sigmoid": {"t": 5.0, "b": -2.0},
}
MINING_OPTIONAL = [name for name in LOSSES if name not in MINING_SETTLED]

# (name, parameters): every loss, every loss that can be mined, mined, and the other form of supcon.
VARIANTS = [(name, LIVELY[name]) for name in LOSSES]
VARIANTS += [(name, {**LIVELY[name], "mine": True, "eps": 0.1}) for name in MINING_OPTIONAL]
VARIANTS += [("supcon", {"tau": 0.3, "variant": "in"})]
IDS = [
    f"{name}{'-mined' if 'mine' in p else ''}{'-in' if p.get('variant') == 'in' else ''}"
    for name, p in VARIANTS
]


def make(variant):
    name, parameters = variant
    return make_loss(name, **parameters)


def batch(m=30, d=8, classes=7, spread=0.7, seed=0, dtype=torch.float64):
    """Unit vectors around class centres, in random order, with one class of a single sample."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (m,), generator=generator) * 3 - 5
    labels[m // 2] = 1000
    centres = torch.randn(1010, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(m, d, generator=generator, dtype=torch.float64)
    X = normalize(centres[labels + 5], dim=1) + spread * normalize(noise, dim=1)
    return normalize(X, dim=1).to(dtype), labels


def relative_error(a, b):
    """Largest difference, relative to the largest entry of b."""
    scale = b.abs().max().clamp(min=1e-300)
    return ((a - b).abs().max() / scale).item()
