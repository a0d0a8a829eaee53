"""Statistics and gradient by the Triton kernels, S on the chip or kept: python triton_sweeps.py CASES OUT

CASES: (kept or not, loss, embeddings, labels, number of processes, tile, blocks) of every case. The
processes take turns here. Without a GPU it needs TRITON_INTERPRET=1.
"""

import sys
from functools import partial

import torch
from triton.runtime import interpreter

from dml.gpw import GlobalPairLoss
from dml.gpw.engine.triton_kept import Block, KeptSweeps
from dml.gpw.engine.triton_ms import Blocks, TritonSweeps
from dml.gpw.engine.triton_probe import probe
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch


def patch_once_per_launch():
    """Triton's interpreter patches its language in every call of a device function, which takes two
    fifths of its time. Here it does so once per launch and module that has such functions."""
    launch, patch, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launched(self, *arguments, **options):
        patched.clear()
        launch(self, *arguments, **options)

    def patch_once(function):
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patch_once


class Turn:
    """A wire on which every process has the whole batch already."""

    def __init__(self, rank, size, *everyone):
        self.rank, self.size, self.everyone = rank, size, everyone

    def gather(self, *own):
        return [x.view(self.size, -1, *x.shape[1:]) for x in self.everyone]


def sweeps(make, loss, X, labels, W, tile):
    """The statistics of all rows, grouped, and dL/dX in the order of the batch."""
    turns = [Turn(rank, W, X, labels) for rank in range(W)]
    batches = [GlobalBatch(X, labels, turn) for turn in turns]
    processes = [make(loss, batch, tile, Workspace()) for batch in batches]
    t = {}
    for batch, process in zip(batches, processes, strict=True):
        for name, own in process.statistics().items():
            t.setdefault(name, torch.full((len(X),), torch.nan))[batch.own_rows] = own
    shared = {name: t[name] for name in loss.shared_statistics}
    parts = [torch.full((len(X) // W, X.shape[1]), torch.nan) for _ in range(W)]
    for process, dX in zip(processes, parts, strict=True):
        process.gradient(shared, 1 / loss.divisor(len(X)), out=dX)
    return t, torch.cat([b.in_input_order(dX) for b, dX in zip(batches, parts, strict=True)])


VIEWS = {
    "contiguous": lambda X: X,
    "transposed": lambda X: X.T.contiguous().T,
    "sliced": lambda X: torch.cat([X, X], 1)[:, : X.shape[1]],
    "every second": lambda X: X.repeat_interleave(2, 0)[::2],
}


def of_view(loss, X, labels, how):
    """Loss and gradient of the same embeddings, stored in another way."""
    found = []
    for kind in (TritonSweeps, KeptSweeps):
        leaf = X.clone().requires_grad_()
        y = labels.repeat_interleave(2)[::2]
        value = GlobalPairLoss(loss, kind=kind)(how(leaf), y)
        value.backward()
        found.append((value.detach(), leaf.grad))
    return found


def main(cases, out):
    patch_once_per_launch()
    found = []
    for kept, *case, blocks in torch.load(cases, weights_only=False):
        on_chip = partial(TritonSweeps, blocks=Blocks(*blocks))
        found.append(sweeps(partial(KeptSweeps, block=Block(64)) if kept else on_chip, *case))
    loss, X, labels = case[:3]
    views = {name: of_view(loss, X, labels, how) for name, how in VIEWS.items()}
    torch.save((found, views, probe(X.device)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
