"""A step of the global loss between two hosts on a slow link, against all-gather with autograd.

    python benchmarks/two_hosts.py [--rate 100mbit] [--m 1000] [--d 512]

Creates two hosts as network namespaces joined by a throttled link (Linux, root, iproute2), runs one
process on each, and removes them. A step is the loss of m embeddings, forward and backward, without a
model. Two baselines compute the loss of their own rows with autograd and differ in how they return the
gradient of the other process's embeddings. The third computes the loss of all rows:
  reduce-scatter  as open_clip does with local_loss and gather_with_grad
  all-reduce      as lightly, vissl and the SimCLR ports do
  whole matrix    as GradCache's loss and pytorch-metric-learning's wrapper do; returns no gradient
All must give the same gradient. Bytes are read from the counter of the link.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import Row, compared, duration, finish, parser

HOSTS = {"dml-h1": "10.77.0.1", "dml-h2": "10.77.0.2"}
SCHEMES = ("ours", "reduce-scatter", "all-reduce", "whole matrix")
# goals for the bytes of a scheme against ours
LEAST_BYTES = {"reduce-scatter": ">= 1.9", "all-reduce": ">= 2.8", "whole matrix": ""}
ROOT = Path(__file__).parents[1]


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def links_up(rate: str) -> None:
    a, b = HOSTS
    for host in HOSTS:
        sh("ip", "netns", "add", host)
    sh("ip", "link", "add", "veth0", "netns", a, "type", "veth", "peer", "veth0", "netns", b)
    for host, address in HOSTS.items():
        sh("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "veth0")
        for device in ("lo", "veth0"):
            sh("ip", "-n", host, "link", "set", device, "up")
        limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
        sh("tc", "-n", host, "qdisc", "add", "dev", "veth0", "root", "tbf", *limit)


def links_down() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def worker(rank: int, m: int, d: int, repeats: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from dml.gpw import GlobalPairLoss, make_loss
    from dml.gpw.engine.general_kernel import GeneralKernel
    from dml.gpw.engine.rows import block_statistics
    from dml.gpw.engine.tiles import RowBlock
    from dml.gpw.grouping import Groups

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    loss = make_loss("multi_similarity", beta=40, lam=0.5)
    generator = torch.Generator().manual_seed(rank)
    b = m // 2
    labels = rank * b + torch.arange(b) // 5
    X = torch.nn.functional.normalize(torch.randn(b, d, generator=generator), dim=1)
    X.requires_grad_()
    ours = GlobalPairLoss(loss, reduction="sum")

    class Gather(torch.autograd.Function):
        """Gathers all embeddings; backward sums the gradient of the own rows over the processes."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, scheme: str) -> Tensor:
            ctx.scheme = scheme
            parts = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(parts, x)
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            if ctx.scheme == "all-reduce":
                dist.all_reduce(grad)
            if ctx.scheme != "reduce-scatter":
                return grad.view(2, b, d)[rank], None
            # a reduce-scatter: each process sends the others their rows and sums what it receives
            received = torch.empty_like(grad)
            dist.all_to_all_single(received, grad.contiguous())
            return received.view(2, b, d).sum(0), None

    def step(scheme: str) -> Tensor:
        X.grad = None
        if scheme == "ours":
            ours(X, labels).backward()
        else:
            everyone = [torch.empty_like(labels) for _ in range(2)]
            dist.all_gather(everyone, labels)
            groups = Groups.of(torch.cat(everyone))  # the batch is grouped already
            Z = Gather.apply(X, scheme)  # type: ignore[no-untyped-call]
            whole = scheme == "whole matrix"
            rows = torch.arange(m) if whole else torch.arange(rank * b, (rank + 1) * b)
            S = (Z if whole else X) @ Z.T
            where = slice(int(rows[0]), int(rows[-1]) + 1)
            block = RowBlock(S, rows, groups, False, on_host=rows, where=where)
            t = block_statistics(loss, GeneralKernel(loss), block, tile=m)
            (loss.sum_of_anchors(t) / m).backward()
        assert X.grad is not None
        return X.grad

    counter = Path("/sys/class/net/veth0/statistics/tx_bytes")
    gradients = {scheme: step(scheme).clone() for scheme in SCHEMES}
    for scheme in SCHEMES[1:]:
        error = (gradients[scheme] - gradients["ours"]).abs().max() / gradients["ours"].abs().max()
        assert error < 1e-4, f"{scheme} gives another gradient: {error}"
    rows = []
    for _ in range(repeats):
        for scheme in SCHEMES:
            dist.barrier()
            sent, start = int(counter.read_text()), time.perf_counter()
            step(scheme)
            seconds = time.perf_counter() - start
            dist.barrier()  # all bytes of the step have been sent
            rows.append((scheme, seconds, int(counter.read_text()) - sent))
    if rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def rows_of(found: list[tuple[str, float, int]], where: str) -> list[Row]:
    """The rows from (scheme, seconds, bytes) of every repetition."""
    seconds = {s: [t for scheme, t, _ in found if scheme == s] for s in SCHEMES}
    sent = {s: [n for scheme, _, n in found if scheme == s] for s in SCHEMES}
    rows = []
    for scheme, least in LEAST_BYTES.items():
        value = f"{statistics.median(sent[scheme]) / 1e6:.2f} MB"
        against = f"ours, {statistics.median(sent['ours']) / 1e6:.2f} MB"
        ratios = [a / b for a, b in zip(sent[scheme], sent["ours"], strict=True)]
        rows.append(compared("two_hosts", f"{scheme} sends", value, against, ratios, least))
        value = duration(statistics.median(seconds[scheme]))
        against = f"ours, {duration(statistics.median(seconds['ours']))}"
        ratios = [a / b for a, b in zip(seconds[scheme], seconds["ours"], strict=True)]
        what = f"{scheme} takes, {where}"
        rows.append(compared("two_hosts", what, value, against, ratios, ">= 1"))
    return rows


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--rate", default="100mbit", help="of the link (default: %(default)s)")
    parse.add_argument("--m", type=int, default=1000, help="global batch (default: %(default)s)")
    parse.add_argument("--d", type=int, default=512, help="embedding size (default: %(default)s)")
    parse.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    parse.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.rank is not None:
        worker(args.rank, args.m, args.d, args.repeats)
        return 0
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("two_hosts: needs root and iproute2 (apt-get install iproute2)", file=sys.stderr)
        return 2

    links_down()  # an interrupted run may have left them
    try:
        links_up(args.rate)
        common = {"MASTER_ADDR": HOSTS["dml-h1"], "MASTER_PORT": "29500"}
        common |= {"GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, *sys.argv[1:]]
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command, "--rank", str(rank)],
                env=os.environ | common,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(HOSTS)
        ]
        outputs = [process.communicate()[0] for process in running]
    finally:
        links_down()
    if any(process.returncode for process in running):
        return 1

    where = f"m = {args.m:,}, d = {args.d}, {args.rate}"
    return finish(rows_of(json.loads(outputs[0]), where), args.json)


if __name__ == "__main__":
    sys.exit(main())
