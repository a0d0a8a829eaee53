"""The Multi-Similarity loss, forward and backward, against two bare matrix products.

    python benchmarks/loss.py
    python benchmarks/loss.py --sizes 1000 --repeats 5

The limit is the work that every exact loss must do: the products S = X X^T and (G + G^T) X, into memory
that is allocated already. The loss is measured at three stages of training, in which mining selects all
negatives (start), a quarter (middle) and one in a thousand (end). In the same repetitions other
implementations compute the same value, at sizes that they can handle: pytorch-metric-learning, the
loop over anchors of the paper's authors (with torch's min and max instead of Python's, which are
slower) and dense autograd.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version

import torch
from measure import Row, as_in_training, finish, interleaved, parser, timed
from torch import Tensor
from torch.nn.functional import normalize

from dml.catalogue import LOSS_PARAMETERS
from dml.gpw import GlobalPairLoss, dense_loss, make_loss

MS = LOSS_PARAMETERS["multi_similarity"]
STAGES = ("start", "middle", "end")
PER_CLASS = 5
LIMIT = "two products"
GOAL = "<= 1.5"
PEERS_UP_TO, LOOP_UP_TO = 4000, 1000
D = 512


def batch(m: int, stage: str, per_class: int = PER_CLASS) -> tuple[Tensor, Tensor]:
    """Unit vectors: at the start all share a direction, in the middle each class has a direction as
    well, at the end the classes share none."""
    torch.manual_seed(0)
    labels = torch.arange(m) // per_class
    common, noise = torch.randn(1, D), torch.randn(m, D)
    centres = torch.randn(m, D)[labels]
    X = {
        "start": common + 0.5 * noise,
        "middle": 0.5 * centres + 0.5 * common + noise,
        "end": centres + 1.5 * noise,
    }[stage]
    return normalize(X).requires_grad_(), labels


@torch.no_grad()
def share_mined(X: Tensor, labels: Tensor) -> float:
    """The share of negative pairs with S > S of the least similar positive - eps."""
    mined = negatives = 0
    for rows, y in zip(X.split(1000), labels.split(1000), strict=True):
        S, same = rows @ X.T, y[:, None] == labels
        least = S.masked_fill(~same, torch.inf).amin(1, keepdim=True)
        mined += int(((S > least - MS["eps"]) & ~same).sum())
        negatives += int((~same).sum())
    return mined / negatives


def products(X: Tensor) -> Callable[[], object]:
    """The limit: two bare products."""
    X = X.detach()
    S, out = X.new_empty(len(X), len(X)), torch.empty_like(X)

    def both() -> None:
        torch.mm(X, X.T, out=S)
        torch.mm(S, X, out=out)

    return both


def with_backward(loss: Callable[[Tensor, Tensor], Tensor], X: Tensor, labels: Tensor) -> float:
    X.grad = None
    value = loss(X, labels)
    value.backward()
    return value.item()


def metric_learning() -> Callable[[Tensor, Tensor], Tensor]:
    from pytorch_metric_learning.losses import MultiSimilarityLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    miner = MultiSimilarityMiner(epsilon=MS["eps"])
    loss = MultiSimilarityLoss(alpha=MS["alpha"], beta=MS["beta"], base=MS["lam"])
    return lambda X, labels: loss(X, labels, miner(X, labels))


def loop(X: Tensor, labels: Tensor) -> Tensor:
    """One anchor at a time, as the authors' MultiSimilarityLoss."""
    alpha, beta, lam, eps = (MS[name] for name in ("alpha", "beta", "lam", "eps"))
    S, terms = X @ X.T, []
    for row, label in zip(S, labels, strict=True):
        pos, neg = row[labels == label], row[labels != label]
        pos = pos[pos < 1 - 1e-5]  # not the anchor itself
        hard_neg = neg[neg + eps > pos.min()]
        hard_pos = pos[pos - eps < neg.max()]
        if len(hard_pos) and len(hard_neg):
            of_pos = torch.log(1 + torch.exp(-alpha * (hard_pos - lam)).sum()) / alpha
            of_neg = torch.log(1 + torch.exp(beta * (hard_neg - lam)).sum()) / beta
            terms.append(of_pos + of_neg)
    return torch.stack(terms).sum() / len(X)


def peers(m: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if m <= PEERS_UP_TO:
        name = f"pytorch-metric-learning {version('pytorch-metric-learning')}"
        found[name] = metric_learning()
        found["dense autograd"] = lambda X, y: dense_loss(make_loss("multi_similarity"), X, y)
    if m <= LOOP_UP_TO:
        found["the authors' loop"] = loop
    return found


def measure(m: int, stage: str, repeats: int) -> list[Row]:
    X, labels = batch(m, stage)
    losses = {"ours": GlobalPairLoss(make_loss("multi_similarity"))}
    losses |= peers(m) if stage == "middle" else {}
    value = with_backward(losses["ours"], X, labels)
    work = {LIMIT: products(X)}
    for name, loss in losses.items():
        same = with_backward(loss, X, labels)
        assert abs(same - value) <= 1e-3 * value, f"{name} gives {same}, ours {value}"
        work[name] = lambda loss=loss: with_backward(loss, X, labels)
    seconds = interleaved(work, repeats)
    where = f"m = {m:,}, {stage} ({share_mined(X, labels):.1%} of negatives mined)"
    return [
        timed(
            "loss",
            f"{name}, {where}",
            seconds[name],
            LIMIT,
            seconds[LIMIT],
            GOAL * (name == "ours"),
        )
        for name in losses
    ]


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 16_000], help="of m")
    parse.add_argument("--repeats", type=int, nargs="+", default=[31, 9, 3], help="for each size")
    args = parse.parse_args()
    as_in_training()
    sizes = list(zip(args.sizes, args.repeats, strict=True))
    rows = [row for m, n in sizes for stage in STAGES for row in measure(m, stage, n)]
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
