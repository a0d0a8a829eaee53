"""What the global loss costs each process: the plan's formulas against 1, 2 and 4 real processes.

    python benchmarks/scale.py [--m 4096] [--d 256]

Compute is the time a process spends on a core, so that processes may outnumber the cores. Bytes are those
handed to torch.distributed; memory is the peak beyond the process's own embeddings (Linux). Medians of
repetitions; exits with 1 when compute does not fall as 1/W within 15%, or the plan's bytes or memory
are not what was measured. Then the same formulas for sizes that no machine here could hold.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

from dml.plan import loss_bytes_sent, loss_flops, loss_memory

TILE = 512
WITHIN = 1.15
MIB = 2**20


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def work(m: int, d: int, repeats: int) -> None:
    """One process of W: prints what it measured."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import normalize

    from dml.gpw import GlobalPairLoss, make_loss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    b = m // processes
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=40, lam=0.5), tile=TILE)
    generator = torch.Generator().manual_seed(rank)
    X = normalize(torch.randn(b, d, generator=generator), dim=1).requires_grad_()
    labels = torch.arange(rank * b, (rank + 1) * b) // 4
    loss_fn(X, labels).backward()  # threads and buffers of the libraries
    seconds = []
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before, sent = resident("VmRSS"), loss_fn.wire.bytes_sent
    for _ in range(repeats):
        X.grad = None
        dist.barrier()
        start = time.thread_time()
        loss_fn(X, labels).backward()
        seconds.append(time.thread_time() - start)
    found = {
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "bytes": (loss_fn.wire.bytes_sent - sent) / repeats,
        "memory": resident("VmHWM") - before,
    }
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)


def fleet(processes: int, m: int, d: int, repeats: int) -> list[dict[str, float]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, __file__, "--work", "--m", m, "--d", d, "--repeats", repeats]
    running = [
        subprocess.Popen(
            [str(word) for word in command],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    return [json.loads(process.communicate()[0]) for process in running]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m", type=int, default=4096, help="batch size (default: %(default)s)")
    parser.add_argument("--d", type=int, default=256, help="embedding size (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.m, args.d, args.repeats)
    m, d = args.m, args.d
    print(f"m = {m:,}, d = {d}, multi-similarity, one thread a process, {args.repeats} repetitions")
    print("  W   core seconds    x W / alone   GFLOP/s     bytes sent (plan)      MiB (plan)")
    missed, alone = [], 0.0
    for processes in (1, 2, 4):
        found = fleet(processes, m, d, args.repeats)
        seconds = statistics.median(one["seconds"] for one in found)
        alone = alone or seconds
        ratio = seconds * processes / alone
        sent, memory = found[0]["bytes"], max(one["memory"] for one in found) / MIB
        plan_sent = loss_bytes_sent(m, d, processes)
        plan_memory = loss_memory(m, d, processes, TILE) / MIB
        rate = loss_flops(m, d, processes) / seconds / 1e9
        print(
            f"{processes:>3}{seconds:>15.3f}{ratio:>15.2f}{rate:>10.1f}"
            f"{sent:>13,.0f} ({plan_sent:,})  {memory:>8.0f} ({plan_memory:.0f})"
        )
        missed += [f"compute at W = {processes}"] if ratio > WITHIN else []
        missed += [f"bytes at W = {processes}"] if sent != plan_sent else []
        missed += [f"memory at W = {processes}"] if memory > WITHIN * plan_memory else []

    print(
        "\n        m      W    d   images a process    sent    memory    GFLOP   (a process and step)"
    )
    for m in (1_000, 16_384, 131_072, 1_048_576):
        for processes in (1, 8, 64, 1024):
            if 1 <= m // processes <= 131_072:
                sent, memory = (
                    loss_bytes_sent(m, 512, processes),
                    loss_memory(m, 512, processes, TILE),
                )
                flops = loss_flops(m, 512, processes) / 1e9
                print(
                    f"{m:>9,}{processes:>7,}  512{m // processes:>14,}"
                    f"{sent / MIB:>12,.0f} MiB{memory / MIB:>8,.0f} MiB{flops:>10,.0f}"
                )
    print("\nmissed: " + ", ".join(missed) if missed else "\nall within bounds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
