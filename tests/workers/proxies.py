"""Losses of proxies on a global batch, plain and in micro-batches, to be compared: python proxies.py OUT_FOLDER"""

import sys
from pathlib import Path

import torch
from network import Network, inputs, leave, own

sys.path.insert(0, str(Path(__file__).parents[1]))
from proxies import IDS, VARIANTS, make, splits

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalProxyLoss
from dml.step import backward


def main(out):
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    results = {}

    def gradient(model, loss, labels, classes, micro_batches, dtype):
        """The loss, the gradient that the optimizer would see, and those of the own proxies."""
        images, y = own(inputs(labels, dtype), rank, size), own(labels, rank, size)
        model.zero_grad()
        loss_fn = GlobalProxyLoss(loss, classes, 8, seed=3).to(dtype)
        value, _ = backward(accelerator, model, loss_fn, images, y, -(-len(y) // micro_batches))
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        return {
            "loss": value.item(),
            "gradient": flat,
            "proxies": loss_fn.proxies.detach(),
            "of proxies": loss_fn.proxies.grad,
            "first": loss_fn.first,
            "norm": loss_fn.gradient_norm.item(),
        }

    for dtype in (torch.float64, torch.float32):
        model = accelerator.prepare(Network(dtype=dtype))
        for name, variant in zip(IDS, VARIANTS, strict=True):
            for split, (labels, classes) in splits().items():
                for k in (1, 3) if split == "classes without samples" else (1,):
                    found = gradient(model, make(variant), labels, classes, k, dtype)
                    results[str(dtype), name, split, k] = found
    torch.save(results, Path(out) / f"{rank}.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
