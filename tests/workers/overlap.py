"""Trains on a device that works 50 ms per step, with a loader that takes 40 ms per batch.

python overlap.py

The device is the fake GPU with a clock: a forward pass keeps it busy from then on, and whoever waits for
it sleeps until it is done. The clock counts only these sleeps and those of the loader, so that the speed
of the machine does not matter. Prints the milliseconds of every step. The loop is that of
dml/training.py; what writes to the run's folder is left out.
"""

import json
import os
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from fakegpu import NAME, FakeGPU

from dml import training
from dml.distributed.signals import Interrupt
from dml.distributed.team import Team
from dml.gpw import GlobalPairLoss, make_loss
from dml.run_folder.clock import Clock
from dml.run_folder.progress import Progress
from dml.running import coming
from dml.running.build import Run

DEVICE, LOADER, STEPS = 50, 40, 8  # milliseconds
LABELS = np.arange(4).repeat(2)


class Busy(FakeGPU):
    """now: the time of the host. until: when the device will have done what it was asked for."""

    now = until = 0

    def wait(self, what):
        super().wait(what)
        self.now = max(self.now, self.until)


class Slow(torch.nn.Module):
    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.linear = gpu, torch.nn.Linear(4, 4)

    def forward(self, x):
        self.gpu.until = max(self.gpu.now, self.gpu.until) + DEVICE
        return torch.nn.functional.normalize(self.linear(x))


def batches(gpu):
    while True:
        gpu.now += LOADER
        yield torch.randn(8, 4), torch.from_numpy(LABELS)


def nothing(*_, **__):
    return None


def make_run(gpu):
    device = torch.device(f"{NAME}:0")
    accelerator = Accelerator(cpu=True)
    team = Team(accelerator, Interrupt())
    team.device = device
    run = object.__new__(Run)
    run.team, run.progress, run.clock = team, Progress(), Clock(device)
    run.plan = SimpleNamespace(steps=STEPS)
    run.config = SimpleNamespace(
        data=SimpleNamespace(workers=0, prefetch=1, cache=None),
        engine=SimpleNamespace(micro_batch=None),
        eval=SimpleNamespace(
            every_steps=None, untrained=False, frozen=False, validation_classes=0, patience=None
        ),
        optim=SimpleNamespace(lr=0.1, warmup_steps=0, schedule="constant"),
        run=SimpleNamespace(seed=0),
        save=SimpleNamespace(every_minutes=10),
    )
    model = Slow(gpu).to(device)
    groups = [{"params": list(model.parameters()), "lr_factor": 1.0}]
    run.model, run.optimizer = model, torch.optim.SGD(groups, lr=0.1)
    run.loss_fn, run.loss_optimizer = GlobalPairLoss(make_loss("multi_similarity")), None
    run.saver = SimpleNamespace(age=lambda: 0.0, save=nothing)
    run.coming = object.__new__(coming.Coming)
    run.coming.config, run.coming.team, run.coming.loss_fn = run.config, team, run.loss_fn
    run.coming.own = SimpleNamespace(all_labels=lambda step: LABELS, spec=None)
    run.coming.order, run.coming.ahead = range(STEPS), SimpleNamespace(at=nothing)
    return run


def main():
    ends = []
    with Busy() as gpu:
        coming.loader = lambda *_: batches(gpu)
        run = make_run(gpu)
        run.reporter = SimpleNamespace(report=lambda *_: ends.append(gpu.now))
        training.loop(run)
    print(json.dumps([b - a for a, b in pairwise(ends)]))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at the end of the interpreter a thread of torch may abort the process
