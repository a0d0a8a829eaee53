"""Losses, recall and the report of pairs on the fake GPU, beside the CPU: python fake_gpu.py OUT_FOLDER [alone]

Started once per process of a group of any size; with `alone`, what needs one process only.
"""

import sys
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import proxies
from batches import IDS, VARIANTS, batch, make
from fakegpu import FakeGPU

from dml.distributed.collectives import Wire
from dml.errors import NotFiniteError
from dml.gpw import LOSSES, GlobalPairLoss, GlobalProxyLoss, Memory, dense_loss, make_loss
from dml.gpw.monitor import pair_report
from dml.recall import recall_at_k, retrieval

STEPS = 2  # the first may wait
GATHERS = "all_gather", "all_gather_into_tensor", "all_gather_single"
SIZES = (4_000, 8), (65_536, 8), (4_000, 1), (65_536, 1)


def steps_of(loss_fn, X, labels, all_labels, put, before_the_second=lambda: None):
    """Loss and gradient of each step."""
    leaves = [put(X.roll(step, 1)).requires_grad_() for step in range(STEPS)]
    y, found = put(labels), []
    for step, leaf in enumerate(leaves):
        if step == 1:
            before_the_second()
        value = loss_fn(leaf, y, all_labels=all_labels)
        value.backward()
        found.append((value.detach(), leaf.grad))
    return found


def report(loss, X, labels):
    """As plain numbers."""
    found = pair_report(loss, X, labels, 16, Wire())
    return [part.counts.cpu() if hasattr(part, "counts") else part for part in vars(found).values()]


def losses(rank, size, grouped, known):
    """For every loss: the steps on the CPU and on the fake GPU, waits and launches."""
    X, labels = batch(m=48, classes=9)
    if grouped:
        order = labels.argsort(stable=True)
        X, labels = X[order], labels[order]
    b = len(X) // size
    mine = slice(rank * b, (rank + 1) * b)
    all_labels, check_pairs = labels if known else None, not (grouped or known)
    results = {}
    for name, variant in zip(IDS, VARIANTS, strict=True):
        loss = make(variant)
        cpu = steps_of(GlobalPairLoss(loss), X[mine], labels[mine], all_labels, torch.clone)
        with FakeGPU() as gpu:
            own = X[mine], labels[mine], all_labels
            found = steps_of(GlobalPairLoss(loss), *own, gpu.put, gpu.reset)
            waits = {where: n / (STEPS - 1) for where, n in gpu.waits.items()}
            unordered = dict(gpu.unordered)
            found = [(value.cpu(), gradient.cpu()) for value, gradient in found]
            gpu.reset()
            pairs = report(loss, gpu.put(X[mine]), gpu.put(labels[mine])) if check_pairs else None
            unordered_pairs = dict(gpu.unordered)
        results[name] = {
            "cpu": cpu,
            "gpu": found,
            "waits": waits,
            "reports": (report(loss, X[mine], labels[mine]), pairs) if check_pairs else None,
            "unordered": (unordered, unordered_pairs),
        }
    return results


def columns_of(loss, put, before_the_last=lambda: None):
    """Three steps with a memory, and two of two towers: losses and gradients."""
    X, labels = batch(m=48, classes=9)
    with_memory, towers = GlobalPairLoss(loss, memory=Memory(100)), GlobalPairLoss(loss)
    leaves = [put(X.roll(step, 1)).requires_grad_() for step in range(4)]
    y, z = put(labels), put(labels.roll(5))
    for step, leaf in enumerate(leaves[:3]):
        if step == 2:
            towers(leaves[3], y, leaves[2], z, all_labels=labels, all_y_labels=labels.roll(5))
            before_the_last()
        ids = torch.arange(48) + 20 * step
        yield with_memory(leaf, y, all_labels=labels, identities=ids), leaf
    value = towers(leaves[3], y, leaves[2], z, all_labels=labels, all_y_labels=labels.roll(5))
    yield value, leaves[3]


def compared_columns():
    """For every loss: what the CPU and the fake GPU find, and where the host waits from the second use on."""
    results = {}
    for name, variant in zip(IDS, VARIANTS, strict=True):
        loss, found = make(variant), {}
        with FakeGPU() as gpu:
            for where, put in (("cpu", torch.clone), ("gpu", gpu.put)):
                steps = []
                for value, leaf in columns_of(loss, put, gpu.reset):
                    leaf.grad = None
                    value.backward()
                    steps.append((value.detach(), leaf.grad))
                waits = dict(gpu.waits)
                found[where] = [(value.cpu(), gradient.cpu()) for value, gradient in steps]
        results[name] = {**found, "waits": waits}
    return results


def compared_proxies():
    """For every loss of proxies: two steps on the CPU and on the fake GPU, and waits of the second."""
    X, labels = batch(m=48, classes=9)
    labels, results = (labels + 5) % 40, {}
    for name, variant in zip(proxies.IDS, proxies.VARIANTS, strict=True):
        found = {}
        with FakeGPU() as gpu:
            for where, put in (("cpu", torch.clone), ("gpu", gpu.put)):
                loss_fn = GlobalProxyLoss(proxies.make(variant), 40, X.shape[1]).double()
                loss_fn.proxies = torch.nn.Parameter(put(loss_fn.proxies.detach()))
                steps = steps_of(loss_fn, X, labels, labels, put, gpu.reset)
                waits = dict(gpu.waits)
                steps.append((loss_fn.gradient_norm, loss_fn.proxies.grad))
                found[where] = [(value.cpu(), gradient.cpu()) for value, gradient in steps]
        results[name] = {**found, "waits": waits}
    return results


def measures(where):
    """The dense loss, recall and the other measures of retrieval."""
    X, labels = batch(m=48, classes=9)
    with FakeGPU() as gpu:
        put = gpu.put if where == "gpu" else torch.clone
        x, y = put(X).requires_grad_(), put(labels)
        value = dense_loss(make_loss("multi_similarity"), x, y)
        value.backward()
        dense, x = (value.detach().cpu(), x.grad.cpu()), x.detach()
        found = astuple(retrieval(x[:9], y[:9], x, y, first=0, chunk=5))
        return dense, [part.cpu() for part in found], recall_at_k(x, y, (1, 2, 4), chunk=7)


def planted_mix():
    """The message of an operation that mixes devices inside the loss."""
    X, labels = batch(m=12)

    def sweeps(loss, found, tile, workspace):
        return found.X + X  # on the CPU

    with FakeGPU() as gpu:
        try:
            GlobalPairLoss(make_loss("multi_similarity"), kind=sweeps)(gpu.put(X), gpu.put(labels))
        except RuntimeError as error:
            return str(error)
    return None


class Many(Wire):
    """The wire of the first of W processes that are not there."""

    def __init__(self, size):
        super().__init__()
        self.processes = size

    size = property(lambda self: self.processes)
    rank = property(lambda self: 0)

    def agree(self, mine, problem):
        assert problem is None


def launches(m, W, d=512):
    """Of the second step of every loss, its backward included. Nothing is computed."""
    found = {}
    labels = torch.arange(m) // 4
    original = {name: getattr(dist, name) for name in GATHERS if hasattr(dist, name)}
    for name in original:  # what W processes would send, counted as one launch
        setattr(dist, name, lambda into, mine, *more: mine.add_(0))
    for name in LOSSES:
        loss_fn = GlobalPairLoss(make_loss(name))
        loss_fn.wire = Many(W)
        with FakeGPU(shapes_only=True) as gpu:
            X = gpu.put(torch.empty(m // W, d, device="meta")).requires_grad_()
            for _ in range(2):
                gpu.reset()
                loss_fn(X, labels[: m // W], all_labels=labels).backward()
            found[name] = sum(gpu.launches.values())
            assert not gpu.waits
    for name, function in original.items():
        setattr(dist, name, function)
    return found


def not_finite():
    """The loss of a second batch with a NaN, and what check_finite says about it."""
    X, labels = batch(m=48)
    with FakeGPU() as gpu:
        loss_fn, y = GlobalPairLoss(make_loss("multi_similarity")), gpu.put(labels)
        loss_fn(gpu.put(X), y)
        X[5, 3] = torch.nan
        value = loss_fn(gpu.put(X), y)
        try:
            loss_fn.check_finite()
        except NotFiniteError as error:
            return value.cpu(), str(error)
    return value.cpu(), None


def alone(out):
    results = {where: measures(where) for where in ("cpu", "gpu")}
    results |= {"mix": planted_mix(), "nan": not_finite(), "columns": compared_columns()}
    results["proxies"] = compared_proxies()
    results["launches"] = {(m, W): launches(m, W) for m, W in SIZES}
    torch.save(results, Path(out) / "alone.pt")


def main(out):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {
        (grouped, known): losses(rank, size, grouped, known)
        for grouped in (False, True)
        for known in (False, True)
    }
    torch.save(results, Path(out) / f"{rank}.pt")
    dist.all_reduce(torch.zeros(1))  # torch would send a barrier's tensor to the fake GPU
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    (alone if rest == ["alone"] else main)(folder)
