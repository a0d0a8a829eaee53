"""Three training steps in which something goes wrong on process 1 only.

python mishap.py KIND
"""

import sys

import torch
from network import Network, inputs, leave, mixed_labels, own

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss, make_loss
from dml.step import update


def main(kind):
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_fn = GlobalPairLoss(make_loss("multi_similarity"))
    for step in range(3):
        labels = mixed_labels(seed=step)
        images, y = own(inputs(labels), rank, size), own(labels, rank, size)
        if rank == 1:
            if kind == "fewer rows":
                images, y = images[1:], y[1:]
            if kind == "no rows":
                images, y = images[:0], y[:0]
            if kind == "label type":
                y = y.int()
            if kind == "float labels":
                y = y.double()
            if kind == "nan" and step == 1:
                images = images.clone()
                images[3] = torch.nan
            if kind == "fewer rows later" and step == 1:
                images, y = images[1:], y[1:]
        update(accelerator, model, loss_fn, optimizer, images, y)
    print("trained")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
