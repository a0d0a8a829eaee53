"""The search by an index against the exact search: how much faster, and what it misses.

    python benchmarks/search_index.py                           # 60,502 vectors, the SOP test set
    python benchmarks/search_index.py --n 1000000               # a million: half an hour
    python benchmarks/search_index.py --n 1000000 --kinds hnsw  # without ivfpq, which learns for long

Vectors lie around centres, five to a centre, and their variance falls with the dimension, as that of
embeddings does: without that no two distances differ much, and no index finds neighbours. Queries are
others around the same centres. The exact search is faiss's IndexFlatIP. Queries come all at once, which
makes the exact search one matrix product, and one by one, as photos that people drop. Recall is the share
of the ten nearest neighbours that the index finds.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial

import faiss
import numpy as np
from measure import Row, compared, duration, finish, interleaved, parser, timed

from dml.inference.index_file import NEIGHBOURS, build, nearest_by_index
from dml.inference.neighbours import Vectors, nearest

ONE_BY_ONE = 50  # queries
GOALS = {"flat": ">= 1", "hnsw": ">= 0.95", "ivfpq": ">= 0.9"}  # recall


def clustered(n: int, d: int, centres: Vectors, seed: int) -> Vectors:
    rng = np.random.default_rng(seed)
    X = centres[rng.integers(0, len(centres), n)]
    X += rng.standard_normal((n, d), dtype=np.float32)
    X *= np.arange(1, d + 1, dtype=np.float32) ** -0.5  # the effective dimension is 23
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--n", type=int, nargs="+", default=[60_502], help="vectors")
    parse.add_argument("--d", type=int, default=128, help="dimensions (default: %(default)s)")
    parse.add_argument("--queries", type=int, default=1000, help="default: %(default)s")
    parse.add_argument("--kinds", nargs="+", default=list(GOALS), choices=GOALS)
    parse.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parse.parse_args()
    faiss.omp_set_num_threads(args.threads)
    rows = [row for n in args.n for row in measured(n, args)]
    return finish(rows, args.json)


def measured(n: int, args: argparse.Namespace) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(2, n // 5), args.d), dtype=np.float32)
    X, queries = clustered(n, args.d, centres, 1), clustered(args.queries, args.d, centres, 2)
    flat = faiss.IndexFlatIP(args.d)
    flat.add(X)
    _, exact = nearest(queries, X, NEIGHBOURS)
    few = queries[:ONE_BY_ONE, None]
    for kind in args.kinds:
        start = time.perf_counter()
        index, _ = build(X, kind)
        made = duration(time.perf_counter() - start)
        work = {
            "index": partial(nearest_by_index, index, queries, X, NEIGHBOURS),
            "exact": partial(flat.search, queries, NEIGHBOURS),
            "index, one by one": lambda: [nearest_by_index(index, q, X, NEIGHBOURS) for q in few],  # noqa: B023
            "exact, one by one": lambda: [flat.search(q, NEIGHBOURS) for q in few],
        }
        seconds = interleaved(work, args.repeats)
        _, found = nearest_by_index(index, queries, X, NEIGHBOURS)
        recall = float((exact[:, :, None] == found[:, None, :]).any(2).mean())
        size = faiss.serialize_index(index).nbytes / X.nbytes
        what = f"{args.queries:,} queries by {kind}, {n:,} x {args.d}, made in {made}"
        yield timed("search_index", what, seconds["index"], "exact", seconds["exact"])
        what = f"{len(few)} queries one by one by {kind}, {n:,}"
        one, exact_one = seconds["index, one by one"], seconds["exact, one by one"]
        yield timed("search_index", what, one, "exact", exact_one)
        what = f"recall@{NEIGHBOURS} of {kind}, {n:,}"
        yield compared("search_index", what, f"{recall:.2%}", "exact", [recall], GOALS[kind])
        what = f"size of {kind}, {n:,}"
        yield compared("search_index", what, f"{size:.2f}", "the vectors", [size])


if __name__ == "__main__":
    sys.exit(main())
