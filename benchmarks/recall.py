"""Retrieval measures against the bare matrix product, and against faiss.

    python benchmarks/recall.py                             # the size of the SOP test set
    python benchmarks/recall.py --n 8131 --sizes 83 83      # of Cars-196

The limit is the product alone: the same chunks, written to one buffer. faiss searches for the 1001
nearest neighbours of every sample, including itself, with IndexFlatIP, which is exact, too.
Linux only: memory is read from /proc.
"""

import sys
from collections.abc import Callable

import faiss
import torch
from measure import MIB, compared, extra_memory, finish, interleaved, number, parser, timed
from torch.nn.functional import normalize

from dml.recall import recall_at_k, retrieval

KS = [1, 10, 100, 1000]
GOALS = {"recall": "<= 1.4", "all measures": "<= 2.5"}  # against the bare product
GIB = 2**30


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--n", type=int, default=60_502, help="samples (default: %(default)s)")
    parse.add_argument("--d", type=int, default=512, help="dimensions (default: %(default)s)")
    parse.add_argument(
        "--sizes",
        type=int,
        nargs=2,
        default=[2, 12],
        help="smallest and largest class (default: %(default)s)",
    )
    parse.add_argument("--chunk", type=int, default=1024, help="queries (default: %(default)s)")
    parse.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parse.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    torch.manual_seed(0)
    smallest, largest = args.sizes
    sizes = torch.randint(smallest, largest + 1, (args.n // smallest + 1,))
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)[: args.n]
    labels = labels[torch.randperm(args.n)]
    # 2.5 gives a Recall@1 of about 0.6, with some positives at high ranks
    centres = torch.randn(len(sizes), args.d)
    X = normalize(centres[labels] + 2.5 * torch.randn(args.n, args.d), dim=1)
    X_numpy = X.numpy()

    def product() -> None:
        S = torch.empty(min(args.chunk, args.n), args.n)
        for rows in X.split(args.chunk):
            torch.mm(rows, X.T, out=S[: len(rows)])

    def search() -> None:
        index = faiss.IndexFlatIP(args.d)
        index.add(X_numpy)
        index.search(X_numpy, min(KS[-1] + 1, args.n))

    work: dict[str, Callable[[], object]] = {
        "product": product,
        "recall": lambda: recall_at_k(X, labels, KS, chunk=args.chunk),
        "all measures": lambda: retrieval(X, labels, X, labels, first=0, chunk=args.chunk),
        "faiss": search,
    }
    peaks: dict[str, list[int]] = {name: [] for name in work}

    def watched(name: str) -> Callable[[], object]:
        return lambda: peaks[name].append(extra_memory(work[name]))

    recall_at_k(X[:2000], labels[:2000], KS)  # warm-up: libraries load, threads start
    watching = {name: watched(name) for name in work}
    seconds = interleaved(watching, args.repeats, warm_ups=0)  # each takes seconds
    where = f"{args.n:,} x {args.d}"
    rows = []
    for name, goal in {**GOALS, "faiss": ""}.items():
        what = f"{name}, {where}"
        rows.append(timed("recall", what, seconds[name], "product", seconds["product"], goal))
    rows.append(
        timed("recall", f"recall, {where}", seconds["recall"], "faiss", seconds["faiss"], "< 1")
    )
    for name in GOALS:
        most = max(peaks[name])
        value = f"{number(most / MIB)} MiB"
        rows.append(compared("recall", f"memory of {name}", value, "1 GiB", [most / GIB], "<= 1"))
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
