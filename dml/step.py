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
from dml.gpw import GlobalPairLoss, GlobalProxyLoss, Memory, make_loss
from dml.gpw.global_loss import triton_problem
from dml.gpw.losses import ProxyLoss
from dml.gpw.weighting import PairLoss
from dml.run_folder.clock import Clock

LossFunction = Callable[..., Tensor]  # (embeddings, labels), and perhaps those of another tower
Pair = tuple[Tensor, Tensor]  # of two towers


def make_loss_fn(
    config: Config, processes: int, device: torch.device, classes: int
) -> GlobalPairLoss | GlobalProxyLoss:
    """The loss of a config; LaunchError if this machine cannot compute what it asks for. classes: those
    that are trained on, each of which has a proxy if the loss has proxies."""
    engine = config.engine
    loss: PairLoss | ProxyLoss = make_loss(config.loss.name, **config.loss.parameters)
    if config.model.batchnorm == "synced" and processes > 1 and device.type == "cpu":
        raise LaunchError("torch synchronises BatchNorm on GPUs only; set model.batchnorm=frozen")
    dtype = torch.float64 if engine.precision == "fp64" else torch.float32
    if engine.kind == "triton" and (problem := triton_problem(loss, dtype, device)):
        raise LaunchError(problem)
    if isinstance(loss, ProxyLoss):
        made = GlobalProxyLoss(loss, classes, config.model.embedding_size, config.run.seed)
        return made.to(device, dtype)
    memory, columns = None, config.memory
    if columns.size is not None:
        memory = Memory(columns.size, columns.weight, columns.from_step)
    return GlobalPairLoss(loss, engine.tile, kind=engine.kind, memory=memory).to(device, dtype)


def seed_random_layers(seed: int, step: int, rank: int) -> None:
    """Random layers (dropout) draw the same numbers in a step, whether the run was resumed or not."""
    torch.manual_seed(mix(seed, step, rank) >> 1)


@dataclass(frozen=True)
class Update:
    """gradient_norm: of the model; None where DeepSpeed does not compute it (stage 0).
    loss_gradient_norm: of what the loss learns, on all processes; None if it learns nothing.
    embeddings: those of this process's images, before the step; of two towers, a pair."""

    loss: float
    gradient_norm: float | None
    loss_gradient_norm: float | None
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
    all_labels: Tensor | Pair | None = None,
    identities: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
    loss_optimizer: Optimizer | None = None,
) -> Update:
    """Make one step of the optimizer; loss and gradient_norm are the same on every process.

    `model` and `optimizer` come from `accelerator.prepare`. images, labels, all_labels: of two towers,
    pairs.
    micro_batch: images per micro-batch; None means all at once. all_labels, identities: those of the
    global batch on the CPU, if they are known; then no process asks for the labels, and a memory leaves
    out the anchor's own image. meanwhile: called while a GPU works on the step, before this process waits
    for the GPU, which happens once per step. loss_optimizer: that of what the loss learns.
    NotFiniteError: the loss or a gradient is NaN or infinite, and the weights are still those of before
    the step, and so is what the loss learns.
    """
    clock = clock or Clock(of_towers(images)[0].device)
    given = accelerator, model, loss_fn, images, labels, micro_batch, clock
    loss, X = backward(*given, all_labels=all_labels, identities=identities)
    norm_of_gradient = gradient_norm(accelerator, model)
    if meanwhile is not None:
        meanwhile()
    with clock("optimizer"):
        value, norm, loss_norm = read_numbers(loss, norm_of_gradient, norm_of_loss(loss_fn))
        if not all(math.isfinite(x) for x in (value, norm or 0, loss_norm or 0)):
            if isinstance(loss_fn, GlobalPairLoss | GlobalProxyLoss):
                loss_fn.check_finite()  # on a GPU: names the embedding, if that is why
            of_loss = "" if loss_norm is None else f", that of what it learns {loss_norm}"
            raise NotFiniteError(f"the loss is {value} and its gradient's norm {norm}{of_loss}")
        optimizer.step()  # under DeepSpeed these two do nothing: backward has already stepped
        optimizer.zero_grad()
        if loss_optimizer is not None:
            loss_optimizer.step()
            loss_optimizer.zero_grad()
    clock.steps += 1
    return Update(value, norm, loss_norm, X)


def norm_of_loss(loss_fn: LossFunction) -> Tensor | None:
    """The norm of the gradient of what a loss learns, on all processes; None if it learns nothing."""
    return loss_fn.gradient_norm if isinstance(loss_fn, GlobalPairLoss | GlobalProxyLoss) else None


def gradient_norm(accelerator: Accelerator, model: nn.Module) -> Tensor | float | None:
    if accelerator.state.deepspeed_plugin is not None:
        engine: Any = model
        norm: Tensor | float | None = engine.get_global_grad_norm()
        return norm
    return nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)


def read_numbers(
    loss: Tensor, norm: Tensor | float | None, of_loss: Tensor | None
) -> tuple[float, float | None, float | None]:
    """The loss and the norms as numbers. Reading waits for the GPU, so they are read together."""
    numbers = [loss, *(x for x in (norm, of_loss) if isinstance(x, Tensor))]
    value, *norms = torch.stack([x.double().to(loss.device) for x in numbers]).tolist()
    return (
        value,
        norms[0] if isinstance(norm, Tensor) else norm,
        None if of_loss is None else norms[-1],
    )


def gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


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
    all_labels: Tensor | Pair | None = None,
    identities: Tensor | None = None,
) -> tuple[Tensor, Tensor | Pair]:
    """Add the gradient of the global loss to the parameters; return the loss and this process's
    embeddings, detached. Arguments as for `update`."""
    inputs, of = of_towers(images), of_towers(labels)
    clock = clock or Clock(inputs[0].device)
    known = {} if identities is None else {"identities": identities}
    if all_labels is not None:
        names = ("all_labels", "all_y_labels")
        known |= dict(zip(names, of_towers(all_labels), strict=False))

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
        torch.autograd.backward(loss)  # also to what the loss learns
        g = list(zip(*(cut(gradient_of(x), micro_batch, most) for x in X), strict=True))

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
