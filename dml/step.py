"""One update: embed, compare globally, backpropagate.

Plain:     X = model(images);  L = loss(X);  backward.

Cached, for batches larger than memory (gradient caching):

    without a graph, one micro-batch at a time:  X_k = model(images_k)
    L = loss(X), and g = dL/dX
    with a graph, one micro-batch at a time:     model(images_k) again, backward of <X_k, g_k>

By the chain rule this is the same gradient, provided that the model treats images independently: so
BatchNorm must be frozen (the plan refuses anything else). Random layers draw the same random numbers in
both passes. Gradients are reduced over the processes once per step.

Two towers: images and labels are pairs, model(x, y) returns two tensors of embeddings, and the loss compares
these. One module holds both encoders, or one encoder for two views, so that it is wrapped once. In micro-
batches it sees parts of x and y at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from dml.config import Config
from dml.data.deck import mix
from dml.errors import LaunchError, NotFiniteError
from dml.gpw import GlobalPairLoss, Memory, make_loss
from dml.gpw.global_loss import triton_problem
from dml.run_folder.clock import Clock

LossFunction = Callable[..., Tensor]  # (embeddings, labels), and perhaps those of another tower
Pair = tuple[Tensor, Tensor]  # of two towers


def make_loss_fn(config: Config, processes: int, device: torch.device) -> GlobalPairLoss:
    """The loss of a config; LaunchError if this machine cannot compute what it asks for."""
    engine, loss = config.engine, make_loss(config.loss.name, **config.loss.parameters)
    if config.model.batchnorm == "synced" and processes > 1 and device.type == "cpu":
        raise LaunchError("torch synchronises BatchNorm on GPUs only; set model.batchnorm=frozen")
    if engine.kind == "triton":
        dtype = torch.float64 if engine.precision == "fp64" else torch.float32
        if problem := triton_problem(loss, dtype, device):
            raise LaunchError(problem)
    memory, columns = None, config.memory
    if columns.size is not None:
        memory = Memory(columns.size, columns.weight, columns.from_step)
    return GlobalPairLoss(loss, engine.tile, kind=engine.kind, memory=memory)


def seed_random_layers(seed: int, step: int, rank: int) -> None:
    """Random layers (dropout) draw the same numbers in a step, whether the run was resumed or not."""
    torch.manual_seed(mix(seed, step, rank) >> 1)


@dataclass(frozen=True)
class Update:
    """gradient_norm: None where DeepSpeed does not compute it (stage 0). embeddings: those of this
    process's images, before the step; of two towers, a pair."""

    loss: float
    gradient_norm: float | None
    embeddings: Tensor | Pair


def update(
    accelerator: Accelerator,
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: Optimizer,
    images: Tensor | Pair,
    labels: Tensor | Pair,
    micro_batch: int | None = None,
    clock: Clock | None = None,
    *,
    all_labels: Tensor | None = None,
    identities: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Update:
    """Make one step of the optimizer; loss and gradient_norm are the same on every process.

    `model` and `optimizer` come from `accelerator.prepare`. images, labels: of two towers, pairs.
    micro_batch: images per micro-batch; None means all at once. all_labels, identities: those of the
    global batch on the CPU, if they are known; then no process asks for the labels, and a memory leaves
    out the anchor's own image. meanwhile: called while a GPU works on the step, before this process waits
    for the GPU, which happens once per step. NotFiniteError: the loss or the gradient is NaN or
    infinite, and the weights are still those of before the step.
    """
    clock = clock or Clock(of_towers(images)[0].device)
    given = accelerator, model, loss_fn, images, labels, micro_batch, clock
    loss, X = backward(*given, all_labels=all_labels, identities=identities)
    norm_of_gradient = gradient_norm(accelerator, model)
    if meanwhile is not None:
        meanwhile()
    with clock("optimizer"):
        value, norm = read_both(loss, norm_of_gradient)
        if not math.isfinite(value) or not math.isfinite(norm or 0):
            if isinstance(loss_fn, GlobalPairLoss):
                loss_fn.check_finite()  # on a GPU: names the embedding, if that is why
            raise NotFiniteError(f"the loss is {value} and its gradient's norm {norm}")
        optimizer.step()  # under DeepSpeed these two do nothing: backward has already stepped
        optimizer.zero_grad()
    clock.steps += 1
    return Update(value, norm, X)


def gradient_norm(accelerator: Accelerator, model: nn.Module) -> Tensor | float | None:
    if accelerator.state.deepspeed_plugin is not None:
        engine: Any = model
        norm: Tensor | float | None = engine.get_global_grad_norm()
        return norm
    return nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)


def read_both(loss: Tensor, norm: Tensor | float | None) -> tuple[float, float | None]:
    """The loss and the norm as numbers. Reading waits for the GPU, so they are read together."""
    if not isinstance(norm, Tensor):
        return loss.item(), norm
    value, read_norm = torch.stack([loss.double(), norm.double().to(loss.device)]).tolist()
    return value, read_norm


def of_towers(x: Tensor | Pair) -> tuple[Tensor, ...]:
    """One tensor, or those of two towers."""
    return (x,) if isinstance(x, Tensor) else x


def backward(
    accelerator: Accelerator,
    model: nn.Module,
    loss_fn: LossFunction,
    images: Tensor | Pair,
    labels: Tensor | Pair,
    micro_batch: int | None = None,
    clock: Clock | None = None,
    *,
    all_labels: Tensor | None = None,
    identities: Tensor | None = None,
) -> tuple[Tensor, Tensor | Pair]:
    """Add the gradient of the global loss to the parameters; return the loss and this process's
    embeddings, detached. Arguments as for `update`."""
    inputs, of = of_towers(images), of_towers(labels)
    clock = clock or Clock(inputs[0].device)
    known = {"all_labels": all_labels, "identities": identities}
    known = {name: x for name, x in known.items() if x is not None}

    def loss_of(embeddings: tuple[Tensor, ...]) -> Tensor:
        each = zip(embeddings, of, strict=True)
        return loss_fn(*(x for tower in each for x in tower), **known)

    most = max(map(len, inputs))
    if micro_batch is None or micro_batch >= most:
        with clock("forward"):
            X = of_towers(model(*inputs))
        with clock("loss"):
            loss = loss_of(X)
        with clock("backward"):
            accelerator.backward(loss)
        return loss.detach(), detached(X)

    count = -(-most // micro_batch)
    if any(len(x) < count for x in inputs):
        raise ValueError(f"{min(map(len, inputs))} images cannot be {count} micro-batches")
    parts = list(zip(*(cut(x, micro_batch, most) for x in inputs), strict=True))
    random, embedded = [], []
    with clock("forward"), torch.no_grad():
        for part in parts:
            random.append(RandomState(inputs[0].device))
            embedded.append(of_towers(model(*part)))
    with clock("loss"):
        X = tuple(torch.cat(x).requires_grad_() for x in zip(*embedded, strict=True))
        loss = loss_of(X)
        whole = torch.autograd.grad(loss, X)
        g = list(zip(*(cut(x, micro_batch, most) for x in whole), strict=True))

    def surrogate(k: int) -> Tensor:
        random[k].restore()
        again = of_towers(model(*parts[k]))
        return torch.stack([torch.sum(a * b) for a, b in zip(again, g[k], strict=True)]).sum()

    with clock("backward"):  # includes the second forward
        backward_all(accelerator, model, surrogate, len(parts))
    return loss.detach(), detached(X)


def detached(X: tuple[Tensor, ...]) -> Tensor | Pair:
    if len(X) == 1:
        return X[0].detach()
    x, y = X
    return x.detach(), y.detach()


def cut(x: Tensor, micro_batch: int, most: int) -> list[Tensor]:
    """Micro-batches: as many as `most` images have, of which the largest tower has `micro_batch` each."""
    if len(x) == most:
        return list(torch.split(x, micro_batch))
    return list(torch.tensor_split(x, -(-most // micro_batch)))


def backward_all(
    accelerator: Accelerator, model: nn.Module, scalar: Callable[[int], Tensor], count: int
) -> None:
    """Backpropagate scalar(0) + ... + scalar(count - 1), one after another, and reduce once."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage > 0:
        # accelerator.no_sync loses gradients under ZeRO-2, and accelerator.backward would step the
        # optimizer every time. DeepSpeed has its own context for this.
        engine: Any = model
        with engine.coalesce_grad_reduction():
            for k in range(count):
                engine.backward(scalar(k))
        engine.step()
        return
    for k in range(count):
        accelerator.sync_gradients = k == count - 1  # ZeRO-0 reads this
        # DDP reads this, in forward and in backward.
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(model):
            accelerator.backward(scalar(k))


class RandomState:
    """The state of the random generators of the CPU and of the images' device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
