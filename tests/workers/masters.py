"""Trains a model in bf16 with DDP and under every ZeRO stage, evaluates it, and writes its weights.

python masters.py FOLDER

FOLDER/HOW.pt has the weights as a checkpoint would hold them, before and after an evaluation, and after
other weights were put in; the fp32 masters that the optimizer of DeepSpeed keeps; and the optimizer's
slots, before and after the first process has sent them to a fresh optimizer. FOLDER/HOW-1.pt has the
weights that the second process received.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from network import inputs, leave, own
from torch import nn
from torch.nn.functional import normalize

from dml.distributed.full_state import (
    bare,
    read_slots,
    read_weights,
    write_slots,
    write_weights,
)
from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss, make_loss
from dml.step import update
from launch.zero import deepspeed_variables, search_path

HOW = ("ddp", "zero1", "zero2", "zero3")


class Model(nn.Module):
    """One weight is larger than those that ZeRO-3 keeps whole on every process (100,000 numbers)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 8)
        )
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        return normalize(self.layers(x - self.mean).float(), dim=1)


def masters(how, model):
    """DeepSpeed's own way to read the weights that its optimizer updates."""
    if how == "ddp":
        return {}
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}


def train(how, out):
    if how != "ddp":
        os.environ.update(deepspeed_variables(how))
        os.environ["PATH"] = search_path()
    accelerator = make_accelerator("bf16")
    rank, size = accelerator.process_index, accelerator.num_processes
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=10, lam=0.5))
    labels = torch.arange(40) % 10
    images, y = own(inputs(labels, torch.float32), rank, size), own(labels, rank, size)
    for _ in range(3):
        update(accelerator, model, loss_fn, optimizer, images, y)

    def evaluate():
        model.eval()
        with torch.no_grad():
            model(images)
        model.train()

    def read():
        return {name: x.detach().clone() for name, x in read_weights(accelerator, model).items()}

    found = {"trained": read()}
    evaluate()
    found |= {"evaluated": read(), "masters": masters(how, bare(accelerator, model))}
    slots = {k: x.clone() for k, x in read_slots(accelerator, model, optimizer).items()}
    write_slots(accelerator, model, optimizer, slots if rank == 0 else {}, 3)
    found |= {"slots": slots, "slots again": read_slots(accelerator, model, optimizer)}
    put_in = {name: x + 2**-20 for name, x in found["trained"].items()}
    write_weights(accelerator, model, put_in if rank == 0 else {})
    evaluate()
    found |= {"put in": put_in, "read back": read()}
    if rank == 0:
        torch.save(found, Path(out) / f"{how}.pt")
    elif how != "zero3":  # where it has a part of each
        torch.save(bare(accelerator, model).state_dict(), Path(out) / f"{how}-1.pt")
    AcceleratorState._reset_state()
    return accelerator


def main(out):
    os.environ["DS_ACCELERATOR"] = "cpu"
    for how in HOW:
        accelerator = train(how, out)
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
