"""Every other loss, forward and backward, against the two products of benchmarks/loss.py.

    python benchmarks/losses.py [--m 4000] [--repeats 5]

The losses of ranks compare every positive with every other image, which is 3 times the elementwise work for
4 images per class; they have a goal of their own. Against them stands the way of the published code of
recall_surrogate, one query at a time, at a size that it can handle.
"""

import sys

import torch
from loss import LIMIT, batch, products, with_backward
from measure import Row, as_in_training, finish, interleaved, parser, timed
from torch import Tensor

from dml.catalogue import LOSS_PARAMETERS
from dml.gpw import LOSSES, GlobalPairLoss, make_loss

GOAL, GOAL_OF_RANKS = "<= 3", "<= 6"
RANKS = ("recall_surrogate", "smooth_ap")
PER_CLASS = 4  # of the losses of ranks, as in the recipe of recall_surrogate
LOOP_UP_TO = 1000
LOOP = "query by query"


def loop(X: Tensor, labels: Tensor) -> Tensor:
    """recall_surrogate of one query at a time; the query itself is not ranked, as in ours."""
    tau, ks = (LOSS_PARAMETERS["recall_surrogate"][name] for name in ("tau", "ks"))
    total = X.new_zeros(())
    for q in range(len(X)):
        S = (X[q] * X).sum(1)
        same = labels == labels[q]
        same[q] = False
        positives = same.nonzero()[:, 0]
        counted = torch.ones(len(X), len(positives))
        counted[q] = 0
        counted[positives, torch.arange(len(positives))] = 0
        before = torch.sigmoid((S[:, None] - S[positives]) / tau) * counted
        ranks = 1 + before.sum(0)
        recalls = [
            torch.sigmoid((k - ranks) / k).sum().clamp(max=k) / min(k, len(positives)) for k in ks
        ]
        total = total + 1 - torch.stack(recalls).mean()
    return total / len(X)


def measure(m: int, names: tuple[str, ...], per_class: int, goal: str, repeats: int) -> list[Row]:
    X, labels = batch(m, "middle", per_class)
    work = {LIMIT: products(X)}
    for name in names:
        loss = GlobalPairLoss(make_loss(name))
        work[name] = lambda loss=loss: with_backward(loss, X, labels)
    seconds = interleaved(work, repeats)
    what = f"m = {m:,}, {per_class} per class, middle"
    return [
        timed("losses", f"{name}, {what}", seconds[name], LIMIT, seconds[LIMIT], goal)
        for name in names
    ]


def against_the_loop(m: int, repeats: int) -> Row:
    X, labels = batch(m, "middle", PER_CLASS)
    losses = {"ours": GlobalPairLoss(make_loss("recall_surrogate")), LOOP: loop}
    values = {name: with_backward(loss, X, labels) for name, loss in losses.items()}
    assert abs(values[LOOP] - values["ours"]) <= 1e-4 * values["ours"], values
    work = {name: lambda loss=loss: with_backward(loss, X, labels) for name, loss in losses.items()}
    seconds = interleaved(work, repeats)
    what = f"recall_surrogate {LOOP}, m = {m:,}, {PER_CLASS} per class, middle"
    return timed("losses", what, seconds[LOOP], "ours", seconds["ours"])


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--m", type=int, default=4000, help="batch size (default: %(default)s)")
    parse.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = parse.parse_args()
    as_in_training()
    others = tuple(name for name in LOSSES if name not in ("multi_similarity", *RANKS))
    rows = measure(args.m, others, 5, GOAL, args.repeats)
    rows += measure(args.m, RANKS, PER_CLASS, GOAL_OF_RANKS, args.repeats)
    rows.append(against_the_loop(min(args.m, LOOP_UP_TO), args.repeats))
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
