"""Peak memory of one loss, forward and backward, beyond its embeddings; growth of memory and time.

    python benchmarks/loss_memory.py                # the curve, each size in a process of its own
    python benchmarks/loss_memory.py --m 16384      # one size, in this process

Linux only: memory is read from /proc. Memory grows as m and time as m^2, so four times the batch may
take 4.5 times the memory and 20 times the time.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from measure import MIB, Row, compared, duration, extra_memory, finish, number, parser, timed
from tqdm import tqdm

from dml.catalogue import LOSS_PARAMETERS

SIZES = (1_024, 4_096, 16_384, 65_536)
LIMITS = {16_384: 300 * MIB, 65_536: 512 * MIB}
MEMORY_GROWS, TIME_GROWS = "<= 4.5", "<= 20"  # from the last size but one to the last


def measure(name: str, m: int, d: int) -> dict[str, float]:
    import torch

    from dml.gpw import GlobalPairLoss, make_loss

    torch.set_num_threads(2)
    torch.manual_seed(0)
    loss = GlobalPairLoss(make_loss(name))
    labels = torch.arange(m) // 5
    X = torch.nn.functional.normalize(torch.randn(m, d), dim=1).requires_grad_()
    small = X.detach()[:100].requires_grad_()
    loss(small, labels[:100]).backward()  # warm-up: libraries load, threads start
    start = time.perf_counter()
    extra = extra_memory(lambda: loss(X, labels).backward())
    seconds = time.perf_counter() - start
    assert X.grad is not None
    return {"extra_bytes": extra, "seconds": round(seconds, 3)}


def rows_of(sizes: Sequence[int], found: dict[int, list[dict[str, float]]]) -> list[Row]:
    memory = {m: [one["extra_bytes"] for one in found[m]] for m in sizes}
    seconds = {m: [one["seconds"] for one in found[m]] for m in sizes}
    rows = []
    for m in sizes:
        limit = LIMITS.get(m, 4 * m * m)
        against = f"{number(limit / MIB)} MiB" + ", the m x m matrix" * (m not in LIMITS)
        value = f"{number(statistics.median(memory[m]) / MIB)} MiB"
        what = f"memory at m = {m:,} in {duration(statistics.median(seconds[m]))}"
        ratios = [extra / limit for extra in memory[m]]
        rows.append(compared("loss_memory", what, value, against, ratios, "<= 1" * (m in LIMITS)))
    before, last = sizes[-2:]
    against = f"at m = {before:,}"
    ratios = [a / b for a, b in zip(memory[last], memory[before], strict=True)]
    what = f"memory at m = {last:,}"
    rows.append(compared("loss_memory", what, rows[-1].value, against, ratios, MEMORY_GROWS))
    what = f"time at m = {last:,}"
    return [
        *rows,
        timed("loss_memory", what, seconds[last], against, seconds[before], TIME_GROWS),
    ]


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--m", type=int, help="one batch size only (default: the whole curve)")
    parse.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of m, for the curve")
    parse.add_argument("--d", type=int, default=128, help="embedding size (default: %(default)s)")
    parse.add_argument("--loss", default="multi_similarity", choices=LOSS_PARAMETERS)
    parse.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parse.parse_args()
    if args.m is not None:
        print(json.dumps(measure(args.loss, args.m, args.d)))
        return 0

    found: dict[int, list[dict[str, float]]] = {m: [] for m in args.sizes}
    for _ in tqdm(range(args.repeats), "loss_memory", leave=False):
        for m in args.sizes:
            command = [sys.executable, __file__, "--m", str(m), "--d", str(args.d)]
            run = subprocess.run(
                [*command, "--loss", args.loss], stdout=subprocess.PIPE, check=True
            )
            found[m].append(json.loads(run.stdout))
    return finish(rows_of(args.sizes, found), args.json)


if __name__ == "__main__":
    sys.exit(main())
