"""Loss and gradient of every loss on a global batch, plain and in micro-batches, to be compared.

python invariance.py OUT_FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from network import Network, inputs, leave, mixed_labels, own, splits

sys.path.insert(0, str(Path(__file__).parents[1]))
from batches import IDS, VARIANTS, make

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss
from dml.step import backward


def main(out):
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    results = {}

    def gradient(model, variant, labels, micro_batches, dtype, tile=24):
        """The loss, and the gradient that the optimizer would see."""
        images, y = own(inputs(labels, dtype), rank, size), own(labels, rank, size)
        b = len(y)
        model.zero_grad()
        loss_fn = GlobalPairLoss(make(variant), tile=tile)
        loss, _ = backward(accelerator, model, loss_fn, images, y, -(-b // micro_batches))
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        return loss.item(), flat

    # every loss, plain and in micro-batches
    for dtype in (torch.float64, torch.float32):
        model = accelerator.prepare(Network(dtype=dtype))
        for name, variant in zip(IDS, VARIANTS, strict=True):
            for k in (1, 2, 5):
                key = (str(dtype), name, k)
                results[key] = gradient(model, variant, mixed_labels(), k, dtype)
    model = accelerator.prepare(Network())
    for split, labels in splits().items():
        for name, variant in zip(IDS, VARIANTS, strict=True):
            results[split, name] = gradient(model, variant, labels, 1, torch.float64)

    # dropout: in micro-batches, against one graph over the same parts, gradients averaged by hand
    plain, prepared = Network(dropout=0.5), accelerator.prepare(Network(dropout=0.5))
    variant = VARIANTS[0]
    labels = mixed_labels()
    images, y = own(inputs(labels), rank, size), own(labels, rank, size)
    for k in (1, 2, 5):
        torch.manual_seed(100 + rank)
        X = torch.cat([plain(part) for part in images.split(-(-len(y) // k))])
        loss = GlobalPairLoss(make(variant))(X, y)
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        if size > 1:
            dist.all_reduce(flat)
        after = torch.get_rng_state()
        torch.manual_seed(100 + rank)
        results["dropout", k] = gradient(prepared, variant, labels, k, torch.float64)
        results["dropout reference", k] = loss.item(), flat / size
        assert torch.equal(torch.get_rng_state(), after), "the random numbers to come differ"

    torch.save(results, Path(out) / f"{rank}.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
