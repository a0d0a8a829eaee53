"""Counts the collectives of a step by watching torch.distributed: python wire.py OUT_FOLDER"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from network import leave

from dml.distributed.processes import make_accelerator
from dml.gpw import LOSSES, GlobalPairLoss, make_loss

WATCHED = [
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv", "isend", "irecv"),
]


def main(out):
    accelerator = make_accelerator()
    rank = accelerator.process_index
    calls = []

    def watch(name, original):
        def watched(*args, **kwargs):
            # the tensor this process contributes is the last one among the arguments
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            calls.append((name, sum(t.numel() * t.element_size() for t in tensors[-1:])))
            return original(*args, **kwargs)

        return watched

    for name in WATCHED:
        if hasattr(dist, name):
            setattr(dist, name, watch(name, getattr(dist, name)))

    b, d = 50, 512
    results = {}
    for name in LOSSES:
        loss_fn = GlobalPairLoss(make_loss(name), tile=64)
        generator = torch.Generator().manual_seed(rank)
        for step in range(2):
            X = torch.randn(b, d, generator=generator)
            X = torch.nn.functional.normalize(X, dim=1).requires_grad_()
            labels = rank * b // 5 + torch.arange(b) // 5
            calls.clear()
            sent = loss_fn.wire.bytes_sent
            loss = loss_fn(X, labels)
            forward = list(calls)
            calls.clear()
            loss.backward()
            results[name, step] = {
                "forward": forward,
                "backward": list(calls),
                "counted": loss_fn.wire.bytes_sent - sent,
            }
    wire = loss_fn.wire
    results["strided"] = wire.gather(torch.arange(6)[::2] + rank, torch.ones(2, 3).T)
    results["everyone"] = wire.everyone("no compiler" if rank == 1 else None)
    torch.save(results, Path(out) / f"{rank}.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
