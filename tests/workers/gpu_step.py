"""Steps of training on the fake GPU and on the CPU; prints what they have in common as JSON.

python gpu_step.py
"""

import json

import torch
from accelerate import Accelerator
from fakegpu import NAME, FakeGPU

from dml.config import Data, Model, Optim
from dml.gpw import GlobalPairLoss, make_loss
from dml.models import make_model
from dml.optim import make_optimizer
from dml.step import update

STEPS = 4
LABELS = torch.arange(6).repeat_interleave(4)


def train(accelerator, device, micro_batch, gpu=None):
    """The losses and norms of some steps, the weights after them, and the waits of each step."""
    device = torch.device(device)
    data = Data(dataset="folder", shards="none", size=16)
    model = make_model(Model(backbone="convnet", embedding_size=16), data, seed=0)
    model = model.double().to(device)
    optimizer = make_optimizer(Optim(lr=1e-3), model)
    model, optimizer = accelerator.prepare(model, optimizer, device_placement=[False, False])
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=10, lam=0.5))
    found, waits = [], []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        images = torch.randint(256, (24, 16, 16, 3), dtype=torch.uint8, generator=random)
        images, labels = (x.to(device, non_blocking=True) for x in (images, LABELS))
        if gpu is not None:
            gpu.reset()
        done = update(
            accelerator, model, loss_fn, optimizer, images, labels, micro_batch, all_labels=LABELS
        )
        waits.append(dict(gpu.waits) if gpu is not None else {})
        found.append((done.loss, done.gradient_norm))
    return found, [p.detach().cpu() for p in model.parameters()], waits


def main():
    accelerator = Accelerator(cpu=True)
    results = {}
    for micro_batch in (None, 8, 3):
        expected, weights, _ = train(accelerator, "cpu", micro_batch)
        with FakeGPU() as gpu:
            found, own, waits = train(accelerator, f"{NAME}:0", micro_batch, gpu)
            apart = max(float((a - b).abs().max()) for a, b in zip(weights, own, strict=True))
        results[str(micro_batch)] = {
            "expected": expected,
            "found": found,
            "weights_apart": apart,
            "waits": waits[1:],
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
