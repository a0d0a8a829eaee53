"""Every other loss, forward and backward, against the two products of benchmarks/loss.py.

python benchmarks/losses.py [--m 4000] [--repeats 5]
"""

import sys

from loss import LIMIT, batch, products, with_backward
from measure import as_in_training, finish, interleaved, parser, timed

from dml.gpw import LOSSES, GlobalPairLoss, make_loss

GOAL = "<= 3"


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--m", type=int, default=4000, help="batch size (default: %(default)s)")
    parse.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = parse.parse_args()
    as_in_training()
    X, labels = batch(args.m, "middle")
    losses = {name: GlobalPairLoss(make_loss(name)) for name in LOSSES}
    del losses["multi_similarity"]
    work = {LIMIT: products(X)}
    for name, loss in losses.items():
        work[name] = lambda loss=loss: with_backward(loss, X, labels)
    seconds = interleaved(work, args.repeats)
    what = f"m = {args.m:,}, middle"
    rows = [
        timed("losses", f"{name}, {what}", seconds[name], LIMIT, seconds[LIMIT], GOAL)
        for name in losses
    ]
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
