"""The state of what the loss learns: proxies, which the processes share out, and numbers that all have.

A checkpoint holds one tensor for all classes, so that a run may resume with another number of processes.
Only the first process ever holds such a tensor, in the machine's memory: the others send it their rows
and get theirs back, some at a time. All processes call these functions at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dml.cost import MIB, classes_of
from dml.distributed.full_state import Named, from_first, slot_names

CHUNK = 64 * MIB  # bytes sent at a time


class Learning(Protocol):
    """A loss with parameters of its own. sharded: of which of them each process has the rows of its
    classes, with the number of all rows. The others are the same on all processes."""

    sharded: dict[str, int]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_parameter(self, target: str, /) -> nn.Parameter: ...


def learned_keys(loss: Learning, optimizer: Optimizer) -> list[str]:
    """NAME, and NAME/slot for what the optimizer keeps."""
    names = slot_names(optimizer)
    return [
        key
        for name, _ in loss.named_parameters()
        for key in (name, *(f"{name}/{slot}" for slot in names))
    ]


def learned_shape(loss: Learning, key: str) -> torch.Size:
    """The shape of a tensor of `read_learned`."""
    name = key.partition("/")[0]
    shape = loss.get_parameter(name).shape
    return torch.Size([loss.sharded[name], *shape[1:]]) if name in loss.sharded else shape


def read_learned(accelerator: Accelerator, loss: Learning, optimizer: Optimizer) -> Named:
    """NAME and NAME/slot -> tensor of all classes, on the first process."""
    found = {}
    for key in learned_keys(loss, optimizer):
        own = tensor_of(loss, optimizer, key)
        shape, name = learned_shape(loss, key), key.partition("/")[0]
        if name in loss.sharded:
            whole = torch.empty(shape, dtype=own.dtype) if accelerator.is_main_process else None
            move(accelerator, own, whole, shape[0], to_first=True)
        else:
            whole = own.detach().to("cpu", copy=True)
        if whole is not None and accelerator.is_main_process:
            found[key] = whole
    return found


def write_learned(
    accelerator: Accelerator, loss: Learning, optimizer: Optimizer, state: Named, step: int
) -> None:
    """Give the loss and its new optimizer what others had after `step` steps. state: of the first
    process; those of the others are not read."""
    remembered: Any = optimizer.state
    for _, p in loss.named_parameters():
        remembered[p] = {slot: torch.zeros_like(p) for slot in slot_names(optimizer)}
        if not isinstance(optimizer, SGD):
            device = p.device if optimizer.defaults["fused"] else None
            remembered[p]["step"] = torch.tensor(float(step), device=device)
    for key in learned_keys(loss, optimizer):
        own = tensor_of(loss, optimizer, key)
        if key.partition("/")[0] in loss.sharded:
            whole = state[key] if accelerator.is_main_process else None
            move(accelerator, own, whole, learned_shape(loss, key)[0], to_first=False)
        else:
            own.data.copy_(from_first(accelerator, state, key, own.shape, own.dtype))


def tensor_of(loss: Learning, optimizer: Optimizer, key: str) -> Tensor:
    """A parameter, or a slot of it."""
    name, _, slot = key.partition("/")
    p = loss.get_parameter(name)
    if not slot:
        return p.data
    state: Any = optimizer.state[p]
    value: Tensor = state.get(slot, torch.zeros_like(p))  # zeros, if it never had a gradient
    return value


def move(
    accelerator: Accelerator, own: Tensor, whole: Tensor | None, rows: int, to_first: bool
) -> None:
    """Between the rows of every process and those of all of them on the first."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    for owner in range(processes):
        first, count = classes_of(owner, processes, rows)
        if owner not in (0, rank) and rank != 0:
            continue
        for start, stop in chunks(count, own):
            mine = own[start:stop] if rank == owner else None
            theirs = None if whole is None else whole[first + start : first + stop]
            move_rows(owner, mine, theirs, own, to_first)


def move_rows(
    owner: int, mine: Tensor | None, theirs: Tensor | None, like: Tensor, to_first: bool
) -> None:
    """mine: the rows on their owner. theirs: on the first process. Each is None on the other."""
    if mine is not None and theirs is not None:
        (theirs if to_first else mine).copy_(mine if to_first else theirs)
    elif theirs is not None:
        sent = torch.empty(theirs.shape, dtype=like.dtype, device=like.device)
        if to_first:
            dist.recv(sent, owner)
            theirs.copy_(sent)
        else:
            dist.send(sent.copy_(theirs), owner)
    elif mine is not None:
        if to_first:
            dist.send(mine.contiguous(), 0)
        else:
            dist.recv(mine, 0)


def chunks(count: int, like: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // (like.shape[1] * like.element_size()))
    for start in range(0, count, step):
        yield start, min(count, start + step)
