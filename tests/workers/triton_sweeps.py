"""Statistics and gradient by the Triton kernels: python triton_sweeps.py CASES OUT

CASES: (loss, embeddings, labels, number of processes, tile, blocks) of every case. The processes
take turns here. Without a GPU it needs TRITON_INTERPRET=1.
"""

import sys

import torch

from dml.gpw.engine.triton_ms import Blocks, TritonSweeps
from dml.gpw.grouping import GlobalBatch


class Turn:
    """A wire on which every process has the whole batch already."""

    def __init__(self, rank, size, *everyone):
        self.rank, self.size, self.everyone = rank, size, everyone

    def gather(self, *own):
        return [x.view(self.size, -1, *x.shape[1:]) for x in self.everyone]


def sweeps(loss, X, labels, W, tile, blocks):
    """The statistics of all rows, grouped, and dL/dX in the order of the batch."""
    turns = [Turn(rank, W, X, labels) for rank in range(W)]
    batches = [GlobalBatch(X, labels, turn) for turn in turns]
    processes = [TritonSweeps(loss, batch, tile, Blocks(*blocks)) for batch in batches]
    t = {}
    for batch, process in zip(batches, processes, strict=True):
        for name, own in process.statistics().items():
            t.setdefault(name, torch.full((len(X),), torch.nan))[batch.own_rows] = own
    shared = {name: t[name] for name in loss.shared_statistics}
    parts = [torch.full((len(X) // W, X.shape[1]), torch.nan) for _ in range(W)]
    for process, dX in zip(processes, parts, strict=True):
        process.gradient(shared, 1 / loss.divisor(len(X)), out=dX)
    return t, torch.cat([b.in_input_order(dX) for b, dX in zip(batches, parts, strict=True)])


def main(cases, out):
    found = [sweeps(*case) for case in torch.load(cases, weights_only=False)]
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
