"""Losses of proxies against the bare products of their shape; a million classes on four processes against the plan.

    python benchmarks/proxies.py [--m 4000] [--d 512] [--classes 50000 100000] [--many 1000000]

The similarities and the gradient of the samples are two products, and the gradient of the proxies is a
third one, so no loss of proxies can take less than 1.5 times the two. Memory is the peak beyond what a
process held before the proxies were made, with Adam, over two steps (Linux); beside it stands what one
process takes that holds all proxies, as every process would if they were replicated.
"""

import sys
from collections.abc import Callable

import torch
from measure import (
    MIB,
    Row,
    as_in_training,
    compared,
    extra_memory,
    finish,
    in_processes,
    interleaved,
    number,
    parser,
    timed,
)
from torch import Tensor
from torch.nn.functional import normalize

from dml.cost import proxy_bytes_sent, proxy_loss_memory, proxy_memory, proxy_rows_at_a_time
from dml.gpw import PROXY_LOSSES, GlobalProxyLoss, make_loss

TWO, THREE = "two products", "three products"
GOAL, WITHIN = "<= 1.6", "<= 1.15"
SMALL_D = 128  # of the many classes


def unit(n: int, d: int, seed: int) -> Tensor:
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def products(X: Tensor, P: Tensor, count: int) -> Callable[[], None]:
    """S = X P^T and G P, in blocks of rows as the loss has them; G^T X is the third."""
    rows = proxy_rows_at_a_time(len(X), len(P), "samples")
    S, dX, dP = torch.empty(rows, len(P)), torch.empty_like(X), torch.zeros_like(P)

    def work() -> None:
        for start in range(0, len(X), rows):
            some = X[start : start + rows]
            block = S[: len(some)]
            torch.mm(some, P.T, out=block)
            torch.mm(block, P, out=dX[start : start + rows])
            if count == 3:
                dP.addmm_(block.T, some)

    return work


def step(loss_fn: GlobalProxyLoss, X: Tensor, labels: Tensor) -> Callable[[], None]:
    def work() -> None:
        loss_fn.proxies.grad = None
        loss_fn(X.detach().requires_grad_(), labels).backward()

    return work


def against_products(m: int, d: int, classes: int, repeats: int) -> list[Row]:
    X, labels = unit(m, d, 0), torch.arange(m) * 7 % classes
    P = unit(classes, d, 1)
    what = f"{m:,} x {classes:,}, d = {d}"
    rows = []
    for name in PROXY_LOSSES:  # one at a time: their proxies take memory
        loss_fn = GlobalProxyLoss(make_loss(name), classes, d)
        work = {TWO: products(X, P, 2), THREE: products(X, P, 3), name: step(loss_fn, X, labels)}
        seconds = interleaved(work, repeats)
        rows.append(timed("proxies", f"{name}, {what}", seconds[name], TWO, seconds[TWO], GOAL))
        rows.append(timed("proxies", f"{name}, {what}", seconds[name], THREE, seconds[THREE]))
    return rows


# ---- many classes ------------------------------------------------------------------------------


def work(m: int, classes: int, name: str) -> dict[str, float]:
    """One process of W: the bytes that it sends in a step, and the memory of two steps."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    b = m // processes
    X, labels = unit(b, SMALL_D, rank), (torch.arange(b) * processes + rank) * 31 % classes
    small = GlobalProxyLoss(make_loss(name), 64, SMALL_D)  # warm-up: threads, buffers of libraries
    small(X.detach().requires_grad_(), labels % 64).backward()
    torch.optim.Adam(small.parameters(), fused=True).step()
    found = {}

    def steps() -> None:
        loss_fn = GlobalProxyLoss(make_loss(name), classes, SMALL_D)
        optimizer = torch.optim.Adam(loss_fn.parameters(), 1e-3, fused=True)
        for _ in range(2):
            loss_fn(X.detach().requires_grad_(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        found["bytes"] = loss_fn.wire.bytes_sent / 2

    found["memory"] = extra_memory(steps)
    dist.barrier()
    return found


def of_many(m: int, classes: int) -> list[Row]:
    rows, processes = [], 4
    for name, anchors in (("proxy_anchor", "proxies"), ("arcface", "samples")):
        found = in_processes(processes, work, m, classes, name)
        (alone,) = in_processes(1, work, m, classes, name)
        what = f"{name}, {classes:,} classes x {SMALL_D}, m = {m:,}, W = {processes}"
        sent, plan = found[0]["bytes"], proxy_bytes_sent(m, SMALL_D, processes, anchors)
        value = f"{sent:,.0f} bytes"
        rows.append(compared("proxies", f"sent, {what}", value, "the plan", [sent / plan], "== 1"))
        # a ring all-reduce of the gradient of all proxies
        naive = 2 * (processes - 1) * classes * SMALL_D * 4 // processes
        against = f"{naive / MIB:,.0f} MiB, replicated"
        rows.append(compared("proxies", f"sent, {what}", value, against, [sent / naive]))
        memory = max(one["memory"] for one in found)
        plan = proxy_memory(SMALL_D, processes, classes, "adam")
        plan += proxy_loss_memory(m, SMALL_D, processes, classes, anchors)
        value = f"{number(memory / MIB)} MiB"
        for against, other, goal in (
            ("the plan", plan, WITHIN),
            (f"{alone['memory'] / MIB:,.0f} MiB, replicated", alone["memory"], ""),
        ):
            rows.append(
                compared("proxies", f"memory, {what}", value, against, [memory / other], goal)
            )
    return rows


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--m", type=int, default=4000, help="batch size (default: %(default)s)")
    parse.add_argument("--d", type=int, default=512, help="embedding size (default: %(default)s)")
    parse.add_argument("--classes", type=int, nargs="+", default=[50_000, 100_000])
    parse.add_argument("--many", type=int, default=10**6, help="default: %(default)s")
    parse.add_argument("--many-m", type=int, default=512, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parse.parse_args()
    rows = of_many(args.many_m, args.many)
    as_in_training()
    for classes in args.classes:
        rows += against_products(args.m, args.d, classes, args.repeats)
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
