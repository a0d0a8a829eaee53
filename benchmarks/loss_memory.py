"""Peak memory of one loss, forward and backward, beyond its embeddings.

    python benchmarks/loss_memory.py                # the curve, each size in a process of its own
    python benchmarks/loss_memory.py --m 16384      # one size, in this process

Linux only: memory is read from /proc. Exits non-zero when a size in LIMITS takes more than allowed.
"""

import argparse
import json
import subprocess
import sys
import time

from dml.catalogue import LOSS_PARAMETERS

MIB = 2**20
LIMITS = {16_384: 300 * MIB}  # the dense matrix alone would be 1 GiB


def resident(field: str) -> int:
    """VmRSS, the memory in use now, or VmHWM, its peak; in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure(name: str, m: int, d: int, tile: int) -> dict[str, float]:
    import torch

    from dml.gpw import GlobalPairLoss, make_loss

    torch.manual_seed(0)
    loss = GlobalPairLoss(make_loss(name), tile=tile)
    labels = torch.arange(m) // 5
    X = torch.nn.functional.normalize(torch.randn(m, d), dim=1).requires_grad_()
    small = X.detach()[:100].requires_grad_()
    loss(small, labels[:100]).backward()  # libraries load and threads start here

    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak so far
    before, start = resident("VmRSS"), time.perf_counter()
    loss(X, labels).backward()
    seconds, peak = time.perf_counter() - start, resident("VmHWM")
    assert X.grad is not None
    return {"extra_bytes": peak - before, "seconds": round(seconds, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--m", type=int, help="batch size; without it, the whole curve")
    parser.add_argument("--d", type=int, default=128, help="embedding size (default: %(default)s)")
    parser.add_argument("--tile", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--loss", default="multi_similarity", choices=LOSS_PARAMETERS)
    args = parser.parse_args()
    if args.m is not None:
        print(json.dumps(measure(args.loss, args.m, args.d, args.tile)))
        return 0

    print(f"{args.loss}, d = {args.d}, tile = {args.tile}; extra memory of forward + backward")
    print(f"{'m':>8} {'MiB':>8} {'m x m matrix, MiB':>18} {'seconds':>8}")
    over = False
    for m in (1_024, 4_096, 16_384):
        command = [sys.executable, __file__, "--m", str(m), "--d", str(args.d)]
        command += ["--tile", str(args.tile), "--loss", args.loss]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        extra = row["extra_bytes"]
        print(f"{m:>8} {extra / MIB:>8.1f} {m * m * 4 / MIB:>18.1f} {row['seconds']:>8.2f}")
        if extra > LIMITS.get(m, extra):
            print(f"         over the limit of {LIMITS[m] / MIB:.0f} MiB", file=sys.stderr)
            over = True
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
