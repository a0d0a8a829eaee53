"""Retrieval measures against the bare matrix product, and against faiss.

    python benchmarks/recall.py                             # the size of the SOP test set
    python benchmarks/recall.py --n 8131 --sizes 83 83      # of Cars-196

The limit is the product alone: the same chunks, into one buffer, nothing counted. faiss searches
for the 1001 nearest of every sample, itself included, with IndexFlatIP, which is exact too.
Medians of interleaved repetitions; exits with 1 when a goal is missed. Linux only: memory is read
from /proc.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import faiss
import torch
from torch.nn.functional import normalize

from dml.recall import recall_at_k, retrieval

KS = [1, 10, 100, 1000]
CHUNK = 1024
AT_MOST = {"recall": 1.4, "all measures": 2.5}  # of the bare product
GIB = 2**30


def resident(field: str) -> int:
    """VmRSS, the memory in use now, or VmHWM, its peak; in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and bytes at the peak beyond those before."""
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak so far
    before, start = resident("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - start, resident("VmHWM") - before


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=60_502, help="samples (default: %(default)s)")
    parser.add_argument("--d", type=int, default=512, help="dimensions (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=[2, 12], help="of a class (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    torch.manual_seed(0)
    smallest, largest = args.sizes
    sizes = torch.randint(smallest, largest + 1, (args.n // smallest + 1,))
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)[: args.n]
    labels = labels[torch.randperm(args.n)]
    # 2.5: Recall@1 of about 0.6, some positives far down the list
    centres = torch.randn(len(sizes), args.d)
    X = normalize(centres[labels] + 2.5 * torch.randn(args.n, args.d), dim=1)
    X_numpy = X.numpy()

    def product() -> None:
        S = torch.empty(min(CHUNK, args.n), args.n)
        for rows in X.split(CHUNK):
            torch.mm(rows, X.T, out=S[: len(rows)])

    def search() -> None:
        index = faiss.IndexFlatIP(args.d)
        index.add(X_numpy)
        index.search(X_numpy, min(KS[-1] + 1, args.n))

    work: dict[str, Callable[[], object]] = {
        "product": product,
        "recall": lambda: recall_at_k(X, labels, KS, chunk=CHUNK),
        "all measures": lambda: retrieval(X, labels, X, labels, first=0, chunk=CHUNK),
        "faiss": search,
    }
    recall_at_k(X[:2000], labels[:2000], KS)  # libraries load and threads start here
    seconds: dict[str, list[float]] = {name: [] for name in work}
    extra = dict.fromkeys(work, 0)
    for _ in range(args.repeats):
        for name, action in work.items():
            took, peak = measured(action)
            seconds[name].append(took)
            extra[name] = max(extra[name], peak)

    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{args.n} x {args.d}, classes of {smallest} to {largest}, {args.threads} threads", end=""
    )
    print(f", {args.repeats} repetitions")
    print(f"{'':<15}{'seconds':>9}{'spread':>17}{'of the product':>16}{'extra MiB':>11}")
    for name, times in seconds.items():
        spread = f"{min(times):.2f} - {max(times):.2f}"
        ratio = median[name] / median["product"]
        print(f"{name:<15}{median[name]:>9.2f}{spread:>17}{ratio:>16.2f}", end="")
        print(f"{extra[name] / 2**20:>11.0f}")

    missed = [
        f"{name} takes {median[name] / median['product']:.2f} of the product, more than {most}"
        for name, most in AT_MOST.items()
        if median[name] > most * median["product"]
    ]
    missed += [f"{name} takes more than 1 GiB" for name in AT_MOST if extra[name] > GIB]
    if median["recall"] >= median["faiss"]:
        missed.append("recall is slower than faiss")
    for goal in missed:
        print(goal, file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
