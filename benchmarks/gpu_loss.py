"""The Multi-Similarity loss on a GPU, forward and backward, against two bare matrix products.

    python benchmarks/gpu_loss.py
    python benchmarks/gpu_loss.py --sizes 1000 --repeats 5

The limit is the work that every exact loss must do: the products S = X X^T and (G + G^T) X, in float32
without TF32, into memory that is allocated already. Prints medians of interleaved repetitions, timed
by the GPU's own clock.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dml.distributed.precision import full_precision
from dml.gpw import GlobalPairLoss, make_loss

LIMIT = "two products"
PRESETS = {"code": {"beta": 40, "lam": 0.5}, "paper": {"beta": 50, "lam": 1.0}}
D = 512
PER_CLASS = 5


def on_chip(*batch: Any) -> object:
    """The kernels for batches whose S does not fit into memory, at any size."""
    from dml.gpw.engine.triton_ms import TritonSweeps

    return TritonSweeps(*batch)


KINDS: dict[str, Any] = {"streaming": "streaming", "triton": "triton", "triton, on chip": on_chip}


def batch(m: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around the centres of their classes, as in the middle of training."""
    torch.manual_seed(0)
    labels = torch.arange(m) // PER_CLASS
    common, noise = torch.randn(1, D, device="cuda"), torch.randn(m, D, device="cuda")
    centres = torch.randn(m, D, device="cuda")[labels.cuda()]
    return normalize(0.5 * centres + 0.5 * common + noise).requires_grad_(), labels


def products(X: Tensor) -> Callable[[], object]:
    """The limit: two bare products."""
    X = X.detach()
    S, out = X.new_empty(len(X), len(X)), torch.empty_like(X)

    def both() -> None:
        with full_precision(X.device):
            torch.mm(X, X.T, out=S)
            torch.mm(S, X, out=out)

    return both


def with_backward(loss: GlobalPairLoss, X: Tensor, labels: Tensor) -> Tensor:
    """The labels are on the CPU, as in training."""
    X.grad = None
    value: Tensor = loss(X, labels, labels)
    value.backward()
    return value.detach()


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every repetition, each of which runs all work once, after one warm-up."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, repeats):
        for name, action in work.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            end.synchronize()
            if repeat >= 0:
                found[name].append(start.elapsed_time(end))
    return found


def measure(m: int, repeats: int) -> dict[str, list[float]]:
    X, labels = batch(m)
    work = {LIMIT: products(X)}
    losses: dict[str, GlobalPairLoss] = {}
    for preset, parameters in PRESETS.items():
        loss = make_loss("multi_similarity", **parameters)
        kinds = {f"{name}, {preset}": GlobalPairLoss(loss, kind=k) for name, k in KINDS.items()}
        values = [with_backward(each, X, labels) for each in kinds.values()]
        for value in values:
            torch.testing.assert_close(value, values[0], rtol=1e-4, atol=0)
        losses |= kinds
    for kind, loss in losses.items():
        work[kind] = lambda loss=loss: with_backward(loss, X, labels)
    return interleaved(work, repeats)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 16_000], help="of m")
    parser.add_argument("--repeats", type=int, default=15, help="default: %(default)s")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_loss.py needs a CUDA GPU, but torch finds none", file=sys.stderr)
        return 2

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, d = {D}")
    print(f"{'m':>8}  {'':<24}{'ms':>10}{'ratio':>8}  quartiles of the ratio")
    for m in args.sizes:
        found = measure(m, args.repeats)
        for name, ms in found.items():
            ratios = [a / b for a, b in zip(ms, found[LIMIT], strict=True)]
            low, ratio, high = statistics.quantiles(ratios, method="inclusive")
            middle = statistics.median(ms)
            print(f"{m:>8,}  {name:<24}{middle:>10.3f}{ratio:>8.2f}  {low:.2f} - {high:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
