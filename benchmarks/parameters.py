"""The Multi-Similarity loss with both presets and with tuned parameters, in every regime of mining.

    python benchmarks/parameters.py
    python benchmarks/parameters.py --sizes 1000 --repeats 5

The limit is that of benchmarks/loss.py. How fast a pair can be worked on must depend neither on the
parameters, which decide whether terms underflow, nor on how many pairs are mined, nor on the size of
classes. The tuned parameters are those of Musgrave et al., A Metric Learning Reality Check.
"""

import sys

import torch
from loss import LIMIT, D, products, with_backward
from measure import Row, as_in_training, finish, interleaved, parser, timed
from torch import Tensor
from torch.nn.functional import normalize

from dml.gpw import GlobalPairLoss, make_loss

PRESETS = {
    "authors' code": {"alpha": 2, "beta": 40, "lam": 0.5, "eps": 0.1},
    "paper's text": {"alpha": 2, "beta": 50, "lam": 1.0, "eps": 0.1},
}
TUNED = {
    "tuned for CUB": {"alpha": 18, "beta": 76, "lam": 0.77, "eps": 0.39},
    "tuned for SOP": {"alpha": 16, "beta": 157, "lam": 0.72, "eps": 0.34},
}
# the share of negatives that are mined, and images per class
REGIMES = [(share, 5) for share in (1.0, 0.25, 0.15, 0.05, 0.001)] + [(0.15, 2), (0.15, 50)]
OF_LARGE = [(0.15, 5)]
LARGE = 16_000  # from here on only the presets, in this regime: a row takes half a minute
GOALS = dict.fromkeys(PRESETS, "<= 1.5") | dict.fromkeys(TUNED, "<= 1.7")
SAMPLE = 1_000  # samples by which a batch is found


def batch(m: int, per_class: int, spread: float) -> tuple[Tensor, Tensor]:
    """Unit vectors that share a direction, with one of their class as well, the stronger the larger
    `spread` is."""
    torch.manual_seed(0)
    labels = torch.arange(m) // per_class
    common, noise, centres = torch.randn(1, D), torch.randn(m, D), torch.randn(m, D)
    return normalize(spread * centres[labels] + 0.5 * common + noise), labels


def share_mined(X: Tensor, labels: Tensor, eps: float) -> float:
    """The share of negative pairs with S > S of the least similar positive - eps; of a sample."""
    X, labels = X[:SAMPLE], labels[:SAMPLE]
    S, same = X @ X.T, labels[:, None] == labels
    least = S.masked_fill(~same, torch.inf).amin(1, keepdim=True)
    return float(((S > least - eps) & ~same).sum() / (~same).sum().clamp(min=1))


def with_share(share: float, m: int, per_class: int, eps: float) -> tuple[Tensor, Tensor]:
    """The batch in which mining selects this share of the negatives, found by bisection."""
    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        X, labels = batch(min(m, SAMPLE), per_class, middle)
        if share_mined(X, labels, eps) > share:
            low = middle
        else:
            high = middle
    return batch(m, per_class, low if share < 1 else 0.0)


def measure(m: int, repeats: int) -> list[Row]:
    names = GOALS if m < LARGE else PRESETS
    rows = []
    for share, per_class in REGIMES if m < LARGE else OF_LARGE:
        for name in names:
            parameters = (PRESETS | TUNED)[name]
            X, labels = with_share(share, m, per_class, parameters["eps"])
            mined = share_mined(X, labels, parameters["eps"])
            loss = GlobalPairLoss(make_loss("multi_similarity", **parameters))
            X.requires_grad_()
            ours = lambda loss=loss, X=X, y=labels: with_backward(loss, X, y)
            seconds = interleaved({LIMIT: products(X), "ours": ours}, repeats)
            what = f"{name}, m = {m:,}, {mined:.3g} mined, classes of {per_class}"
            times = seconds["ours"], LIMIT, seconds[LIMIT]
            rows.append(timed("parameters", what, *times, GOALS[name]))
    return rows


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 16_000], help="of m")
    parse.add_argument("--repeats", type=int, nargs="+", default=[21, 5, 3], help="for each size")
    args = parse.parse_args()
    as_in_training()
    rows = [row for m, n in zip(args.sizes, args.repeats, strict=True) for row in measure(m, n)]
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
