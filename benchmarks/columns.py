"""Anchors against columns that are not the batch, against bare products of the same shapes.

    python benchmarks/columns.py
    python benchmarks/columns.py --columns 50000 --repeats 3

Mined multi-similarity with both published presets, value and gradient:

- a cross-batch memory: A against the columns Y, and the gradient of A. The limit is the two products
  S = A Y^T and G Y, into memory that is allocated already.
- two towers on one process: X against Y and Y against X, and both gradients. The limit is two products
  for each direction.
- a memory of 50,000 x 128 at a batch of 64, whose time is also held against its products, and whose bytes
  against those of the plan.
"""

import sys
from collections.abc import Callable

import torch
from measure import Row, as_in_training, finish, interleaved, parser, timed
from torch import Tensor
from torch.nn.functional import normalize

from dml.catalogue import PRESETS
from dml.cost import memory_cost
from dml.distributed.collectives import Wire
from dml.gpw import GlobalPairLoss, Memory, make_loss
from dml.gpw.engine.workspace import Workspace
from dml.gpw.memory import compare
from dml.gpw.weighting import PairLoss

PER_CLASS, D = 5, 512
SMALL, SMALL_D = 64, 128
TILE = 1024
GOAL = "<= 1.6"


def vectors(count: int, classes: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit vectors in the middle of training: all share a direction, and those of a class another one."""
    torch.manual_seed(0)
    common, centres = torch.randn(1, d), torch.randn(classes, d)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, d, generator=generator)
    return normalize(0.5 * centres[labels] + 0.5 * common + noise), labels


def products(A: Tensor, Y: Tensor, both: bool = False) -> Callable[[], object]:
    """The limit: A Y^T and G Y; for both directions also Y A^T and G^T A."""
    S, out = A.new_empty(len(A), len(Y)), torch.empty_like(A)
    other = torch.empty_like(Y)

    def bare() -> None:
        torch.mm(A, Y.T, out=S)
        torch.mm(S, Y, out=out)
        if both:
            back = S.view(len(Y), len(A))
            torch.mm(Y, A.T, out=back)
            torch.mm(back, A, out=other)

    return bare


def remembering(loss: PairLoss, A: Tensor, labels: Tensor, memory: Memory) -> Callable[[], object]:
    workspace, wire, ids = Workspace(), Wire(), torch.arange(len(A)) + 10**9
    given = loss, memory, A, labels, ids, len(A), 1.0, TILE, workspace, wire

    @torch.inference_mode()
    def step() -> object:
        return compare(*given)

    return step


def filled(Y: Tensor, labels: Tensor) -> Memory:
    memory = Memory(len(Y))
    memory.enqueue(Y, labels, torch.arange(len(Y)))
    return memory


def of_memory(preset: str, loss: PairLoss, anchors: int, columns: int, repeats: int) -> Row:
    A, labels = vectors(anchors, columns // PER_CLASS, D, seed=1)
    Y, column_labels = vectors(columns, columns // PER_CLASS, D, seed=2)
    limit = "two products"
    ours = remembering(loss, A, labels, filled(Y, column_labels))
    seconds = interleaved({limit: products(A, Y), "ours": ours}, repeats)
    what = f"memory, {anchors:,} x {columns:,}, {preset}"
    return timed("columns", what, seconds["ours"], limit, seconds[limit], GOAL)


def of_towers(preset: str, loss: PairLoss, anchors: int, columns: int, repeats: int) -> Row:
    x, labels = vectors(anchors, columns // PER_CLASS, D, seed=1)
    y, y_labels = vectors(columns, columns // PER_CLASS, D, seed=2)
    loss_fn, limit = GlobalPairLoss(loss, TILE), "two products per direction"
    leaves = x.clone().requires_grad_(), y.clone().requires_grad_()

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss_fn(leaves[0], labels, leaves[1], y_labels).backward()

    seconds = interleaved({limit: products(x, y, both=True), "ours": step}, repeats)
    what = f"two towers, {anchors:,} x {columns:,}, {preset}"
    return timed("columns", what, seconds["ours"], limit, seconds[limit], GOAL)


def of_small_batch(size: int, repeats: int) -> list[Row]:
    """The memory of a small batch: its time against its products, its bytes against the plan."""
    A, labels = vectors(SMALL, size // PER_CLASS, SMALL_D, seed=1)
    Y, column_labels = vectors(size, size // PER_CLASS, SMALL_D, seed=2)
    memory, loss = filled(Y, column_labels), make_loss("multi_similarity")
    ours, limit = remembering(loss, A, labels, memory), "two products"
    seconds = interleaved({limit: products(A, Y), "ours": ours}, repeats)
    what = f"memory, {SMALL} x {size:,} x {SMALL_D}"
    rows = [timed("columns", what, seconds["ours"], limit, seconds[limit], "<= 2.5")]

    workspace = Workspace()
    given = torch.arange(SMALL) + 10**9, SMALL, 1.0, TILE, workspace, Wire()
    with torch.inference_mode():
        term = compare(loss, memory, A, labels, *given)
    assert term is not None
    assert memory.X is not None
    held = [memory.X, memory.labels, memory.identities, term.gradient, *workspace.buffers.values()]
    measured = sum(x.numel() * x.element_size() for x in held if x is not None)
    planned = memory_cost(size, 0, SMALL, SMALL_D, TILE).bytes
    value = f"{measured / 2**20:.1f} MiB"
    against = f"the plan, {planned / 2**20:.1f} MiB"
    rows.append(Row("columns", f"{what}: bytes", value, against, measured / planned, "", "<= 1.1"))
    return rows


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument(
        "--small", type=int, default=50_000, help="size of the memory of a small batch"
    )
    parse.add_argument("--anchors", type=int, default=4000)
    parse.add_argument("--columns", type=int, nargs="+", default=[50_000, 100_000])
    parse.add_argument("--repeats", type=int, nargs="+", default=[5, 3], help="for each of these")
    args = parse.parse_args()
    as_in_training()
    rows = of_small_batch(args.small, 31)
    for columns, repeats in zip(args.columns, args.repeats, strict=True):
        for preset, values in PRESETS.items():
            loss = make_loss("multi_similarity", **values)
            rows.append(of_memory(preset, loss, args.anchors, columns, repeats))
            rows.append(of_towers(preset, loss, args.anchors, columns, repeats))
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
