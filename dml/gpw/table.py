"""Table 1 of the paper, computed for every pair loss: which similarities the weight of a negative pair
depends on.

    python -m dml.gpw.table

In an example batch, one negative pair is watched while
  S: all similarities are shifted together (its own changes, the relative ones do not),
  P: only the positive pairs are shifted,
  N: only the other negative pairs are shifted.
If its weight changes, the loss considers that similarity.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from dml.gpw.losses import LOSSES, make_loss
from dml.gpw.reference import weights_of_similarities
from dml.gpw.weighting import PairLoss

# Multiples of the histogram's step (Delta = 2/150), so that its interpolation has no effect.
SHIFTS = tuple(steps * 2 / 150 for steps in (-15, -6, 6, 15))


def dependence(loss: PairLoss) -> str:
    """The letters among S, P and N that the negative weight of a loss depends on."""
    S, labels = example()
    positive = labels[:, None] == labels
    watched = torch.zeros_like(positive)
    watched[0, S[0].masked_fill(positive[0], -1).argmax()] = True  # hard, so that it is mined
    everything = torch.ones_like(positive)
    moved = {"S": everything, "P": positive, "N": ~positive & ~watched}

    def weight(S: Tensor) -> Tensor:
        return weights_of_similarities(loss, S, labels)[1][watched]

    at_rest = weight(S)
    return "".join(
        letter
        for letter, which in moved.items()
        if any(
            not torch.allclose(weight(S + shift * which.double()), at_rest, rtol=1e-9, atol=0)
            for shift in SHIFTS
        )
    )


def example() -> tuple[Tensor, Tensor]:
    """Three classes of three; positives around 0.55, negatives around 0.45, within every margin."""
    labels = torch.arange(9) // 3
    generator = torch.Generator().manual_seed(0)
    noise = 0.2 * (torch.rand(9, 9, generator=generator, dtype=torch.float64) - 0.5)
    S = 0.45 + 0.1 * (labels[:, None] == labels) + (noise + noise.T) / 2
    return S, labels


def rows() -> dict[str, PairLoss]:
    """Every loss, and the two that the ablation also mines.

    The default lam = 0.5 lies in the middle of the similarities of the example. With lam = 1 and
    beta = 50 the weight of a pair at 0.5 would be 1e-11, and what it depends on lost in rounding.
    """
    losses = {name: make_loss(name) for name in LOSSES}
    losses["binomial_deviance, mined"] = make_loss("binomial_deviance", mine=True)
    losses["lifted_structure_star, mined"] = make_loss("lifted_structure_star", mine=True)
    return losses


def table() -> str:
    lines = [f"{'loss':<34} S  P  N"]
    for name, loss in rows().items():
        letters = dependence(loss)
        marks = "  ".join("x" if letter in letters else "-" for letter in "SPN")
        lines.append(f"{name:<34} {marks}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m dml.gpw.table",
        description="Print which similarities (S: self, P: relative to positives, N: relative to "
        "other negatives) the weight of a negative pair depends on, for every loss (Table 1).",
    ).parse_args()
    print(table())
