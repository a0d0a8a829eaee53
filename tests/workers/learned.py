"""What pair losses learn, on a global batch, with towers and with a memory: python learned.py OUT_FOLDER"""

import sys
from pathlib import Path

import torch
from network import inputs, leave, mixed_labels, own
from torch.nn.functional import normalize

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss, Memory, make_loss

LEARNING = {
    "margin": {"alpha": 0.2, "beta": 0.9, "dim": 12, "cutoff": 0.7, "nonzero_loss_cutoff": 1.3},
    "pairwise_sigmoid": {"t": 5.0, "b": -2.0},
}


def main(out):
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    labels, results = mixed_labels(), {}
    views = [normalize(inputs(labels, seed=seed), dim=1) for seed in (0, 1)]
    y = own(labels, rank, size)
    for name, parameters in LEARNING.items():
        for how in ("batch", "towers", "memory"):
            memory = Memory(60, weight=0.7) if how == "memory" else None
            loss = make_loss(name, **parameters, learn=True)
            loss_fn = GlobalPairLoss(loss, tile=16, reduction="sum", memory=memory).double()
            a, b = (own(x, rank, size).requires_grad_() for x in views)
            if how == "memory":
                loss_fn(b, y)  # which fills it
            value = loss_fn(a, y, b, y) if how == "towers" else loss_fn(a, y)
            value.backward()
            gradients = {k: p.grad.item() for k, p in loss_fn.learned.items()}
            results[name, how] = value.item(), gradients, loss_fn.gradient_norm.item(), a.grad
    torch.save(results, Path(out) / f"{rank}.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
