"""What the global loss costs each process: the plan's formulas against 1, 2 and 4 real processes.

    python benchmarks/scale.py [--m 4096] [--d 256]

Compute is the CPU time of a process for its two sweeps. The processes take turns at their sweeps, so
that there may be more of them than cores and they do not compete for the cache. Compute must fall as
1/W within 15%, starting from the time of one process that sweeps by rows as several processes do. (By
default one process uses the symmetry of S and computes half of it; W processes need 4/3 of these
products.) Bytes are those handed to torch.distributed. Memory is the peak beyond the process's own
embeddings (Linux). Both are compared with the plan. At the end the formulas are printed for larger
sizes.
"""

import fcntl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from measure import MIB, Row, compared, duration, extra_memory, finish, in_processes, number, parser
from tqdm import tqdm

from dml.cost import loss_bytes_sent, loss_flops, loss_memory

TILE = 1024
WITHIN = "<= 1.15"


class Turns:
    """A `kind` of GlobalPairLoss: lets one process at a time run its sweeps, and adds up their CPU
    time."""

    def __init__(self, make_sweeps: Callable[..., Any], lock: IO[str]) -> None:
        self.make_sweeps, self.lock, self.seconds = make_sweeps, lock, 0.0

    def __call__(self, *arguments: Any) -> "Turns":
        self.sweeps = self.in_turn(self.make_sweeps, *arguments)
        return self

    def statistics(self) -> Any:
        return self.in_turn(self.sweeps.statistics)

    def gradient(self, *arguments: Any, **named: Any) -> None:
        self.in_turn(self.sweeps.gradient, *arguments, **named)
        del self.sweeps  # GlobalPairLoss would not hold its batch until the next step either

    def in_turn(self, sweep: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        start = time.thread_time()
        result = sweep(*arguments, **named)
        self.seconds += time.thread_time() - start
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return result


def work(m: int, d: int, repeats: int, by_rows: bool, lock: str) -> dict[str, Any]:
    """One process of W: its seconds, bytes and memory. lock: a file that each opens for itself, for what is
    inherited would be locked by all."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import normalize

    from dml.gpw import GlobalPairLoss, make_loss
    from dml.gpw.engine.rows import RowSweeps
    from dml.gpw.engine.sweeps import choose_sweeps

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    b = m // processes
    turns = Turns(RowSweeps if by_rows else choose_sweeps, open(lock))  # noqa: SIM115
    loss = make_loss("multi_similarity", beta=40, lam=0.5)
    loss_fn = GlobalPairLoss(loss, tile=TILE, kind=turns)
    generator = torch.Generator().manual_seed(rank)
    X = normalize(torch.randn(b, d, generator=generator), dim=1).requires_grad_()
    labels = torch.arange(rank * b, (rank + 1) * b) // 4
    few = X.detach()[:40].requires_grad_()
    # warm-up: threads and buffers of the libraries
    GlobalPairLoss(loss)(few, labels[:40]).backward()
    seconds, sent = [], loss_fn.wire.bytes_sent

    def steps() -> None:
        for _ in range(repeats):
            X.grad = None
            turns.seconds = 0
            loss_fn(X, labels).backward()
            seconds.append(turns.seconds)

    memory = extra_memory(steps)
    sent = (loss_fn.wire.bytes_sent - sent) / repeats
    found = {"seconds": seconds, "bytes": sent, "memory": memory}
    dist.barrier()
    return found


def fleet(
    processes: int, m: int, d: int, repeats: int, by_rows: bool = False
) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile() as lock:
        return in_processes(processes, work, m, d, repeats, by_rows, lock.name)


def rows_of(m: int, d: int, repeats: int) -> list[Row]:
    rows = []
    for processes in tqdm((1, 2, 4), "scale", leave=False):
        alone = statistics.median(fleet(1, m, d, repeats, by_rows=True)[0]["seconds"])
        found = fleet(processes, m, d, repeats)
        seconds = [second for one in found for second in one["seconds"]]
        median = statistics.median(seconds)
        where = f"W = {processes}, m = {m:,}, d = {d}"
        rate = loss_flops(m, d, processes) / median / 1e9
        value = f"{duration(median)}, {number(rate)} GFLOP/s"
        ratios = [processes * second / alone for second in seconds]
        against = "W = 1 by rows"
        rows.append(compared("scale", f"compute x W, {where}", value, against, ratios, WITHIN))
        if processes > 1:
            sent, plan = found[0]["bytes"], loss_bytes_sent(m, d, processes)
            value = f"{sent:,.0f} bytes"
            rows.append(
                compared("scale", f"sent, {where}", value, "the plan", [sent / plan], "== 1")
            )
        memory, plan = max(one["memory"] for one in found), loss_memory(m, d, processes, TILE)
        value = f"{number(memory / MIB)} MiB"
        rows.append(
            compared("scale", f"memory, {where}", value, "the plan", [memory / plan], WITHIN)
        )
    return rows


def print_larger() -> None:
    print(
        "\n        m      W    d   images/process      sent    memory    GFLOP   (per process and step)"
    )
    for m in (1_000, 16_384, 131_072, 1_048_576):
        for processes in (1, 8, 64, 1024):
            if 1 <= m // processes <= 131_072:
                sent = loss_bytes_sent(m, 512, processes)
                memory = loss_memory(m, 512, processes, TILE)
                flops = loss_flops(m, 512, processes) / 1e9
                print(
                    f"{m:>9,}{processes:>7,}  512{m // processes:>14,}"
                    f"{sent / MIB:>12,.0f} MiB{memory / MIB:>8,.0f} MiB{flops:>10,.0f}"
                )


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--m", type=int, default=4096, help="batch size (default: %(default)s)")
    parse.add_argument("--d", type=int, default=256, help="embedding size (default: %(default)s)")
    parse.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    args = parse.parse_args()
    code = finish(rows_of(args.m, args.d, args.repeats), args.json)
    print_larger()
    return code


if __name__ == "__main__":
    sys.exit(main())
