"""Trains a small network for some steps and writes its parameters, for any launcher.

python training.py OUT STEPS MICRO_BATCHES DTYPE
"""

import sys

import torch
import torch.distributed as dist
from network import Network, inputs, leave, own
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss, make_loss
from dml.step import update

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def count_reductions():
    """Notes every reduction that torch.distributed is asked for."""
    calls = []

    def watched(name, original):
        def call(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        return call

    for name in REDUCTIONS:
        setattr(dist, name, watched(name, getattr(dist, name)))
    return calls


def main(out, steps, micro_batches, dtype):
    dtype = getattr(torch, dtype)
    reductions = count_reductions()
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    model = Network(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, allreduce_hook)  # what DDP does below Python, seen
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=10, lam=0.5), tile=16)
    for step in range(int(steps)):
        labels = torch.randint(10, (40,), generator=torch.Generator().manual_seed(step))
        images, y = own(inputs(labels, dtype, seed=step), rank, size), own(labels, rank, size)
        reductions.clear()
        micro_batch = -(-len(y) // int(micro_batches))
        done = update(accelerator, model, loss_fn, optimizer, images, y, micro_batch)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        state = {name: x.clone() for name, x in state.items()}
        torch.save({"parameters": state, "loss": done.loss, "reductions": reductions}, out)
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
