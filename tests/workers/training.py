"""Trains a small network for some steps and writes its parameters, for any launcher.

python training.py FOLDER STEPS DTYPE MICRO_BATCHES...

The training with K micro-batches per step goes to FOLDER/K.pt. All trainings share the processes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
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


def train(accelerator, out, steps, dtype, micro_batches, reductions):
    """Write the parameters, the last loss and the reductions of the last step."""
    rank, size = accelerator.process_index, accelerator.num_processes
    model = Network(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, allreduce_hook)  # what DDP does below Python, seen
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=10, lam=0.5), tile=16)
    for step in range(steps):
        labels = torch.randint(10, (40,), generator=torch.Generator().manual_seed(step))
        images, y = own(inputs(labels, dtype, seed=step), rank, size), own(labels, rank, size)
        reductions.clear()
        micro_batch = -(-len(y) // micro_batches)
        done = update(accelerator, model, loss_fn, optimizer, images, y, micro_batch)
    last = list(reductions)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        state = {name: x.clone() for name, x in state.items()}
        torch.save({"parameters": state, "loss": done.loss, "reductions": last}, out)


def main(folder, steps, dtype, *micro_batches):
    reductions = count_reductions()
    for k in map(int, micro_batches):
        accelerator = make_accelerator()
        out = Path(folder) / f"{k}.pt"
        train(accelerator, out, int(steps), getattr(torch, dtype), k, reductions)
        AcceleratorState._reset_state()  # DeepSpeed takes one model per Accelerator
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
