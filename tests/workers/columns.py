"""Two towers and a memory on a global batch, plain and in micro-batches, to be compared.

python columns.py OUT_FOLDER
"""

import sys
from pathlib import Path

import torch
from network import Network, TwoTowers, inputs, leave, own, remembered, tower_cases, tower_labels

sys.path.insert(0, str(Path(__file__).parents[1]))
from batches import IDS, VARIANTS, make

from dml.distributed.processes import make_accelerator
from dml.gpw import GlobalPairLoss, Memory
from dml.step import backward


def main(out):
    accelerator = make_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    results, variants = {}, dict(zip(IDS, VARIANTS, strict=True))

    def gradient(model):
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    model = accelerator.prepare(TwoTowers())
    for case, (labels, y_labels) in tower_labels().items():
        images = [own(inputs(z, seed=s), rank, size) for s, z in enumerate((labels, y_labels))]
        mine = own(labels, rank, size), own(y_labels, rank, size)
        for name, k in tower_cases(case):
            loss_fn = GlobalPairLoss(make(variants[name]), tile=24)
            model.zero_grad()
            micro = -(-len(mine[0]) // k)
            loss, _ = backward(accelerator, model, loss_fn, tuple(images), mine, micro)
            key = "towers", case, name, k
            results[key] = loss.item(), gradient(model), loss_fn.wire.bytes_sent

    model = accelerator.prepare(Network())
    for name, variant in variants.items():
        for k in (1, 2) if name == IDS[0] else (1,):
            loss_fn = GlobalPairLoss(make(variant), tile=24, memory=Memory(100, weight=0.7))
            plain, sent = GlobalPairLoss(make(variant), tile=24), []
            for labels, ids, images in remembered():
                model.zero_grad()
                mine = own(images, rank, size), own(labels, rank, size)
                micro = -(-len(mine[0]) // k)
                known = {"all_labels": labels, "identities": ids}
                before = loss_fn.wire.bytes_sent
                loss, X = backward(accelerator, model, loss_fn, *mine, micro, **known)
                sent.append(loss_fn.wire.bytes_sent - before)
            plain(X, mine[1], all_labels=labels)
            key = "memory", name, k
            results[key] = loss.item(), gradient(model), (sent, plain.wire.bytes_sent)
            results["queue", name, k] = loss_fn.memory.state()

    torch.save(results, Path(out) / f"{rank}.pt")
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
