"""The full state of a run by parameter name, for any ZeRO stage: weights and optimizer slots.

Under ZeRO every process holds a part of flat buffers. Checkpoints know nothing of that: they hold one
tensor per parameter, as a single process would have it, so that a run may resume with another number
of processes, another stage, or without DeepSpeed. All processes call these functions at the same time,
since under ZeRO they gather from each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

# what an optimizer keeps per parameter, besides the number of steps
SLOTS = {
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
}
Named = dict[str, Tensor]


def zero_stage(accelerator: Accelerator) -> int:
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else int(plugin.zero_stage)


def bare(accelerator: Accelerator, model: Any) -> nn.Module:
    """The model inside its wrapper. (accelerate's unwrap_model imports DeepSpeed wherever it is
    installed, which takes seconds and prints a warning.)"""
    deepspeed = accelerator.state.deepspeed_plugin is not None
    inner: nn.Module = (
        model.module if deepspeed or isinstance(model, DistributedDataParallel) else model
    )
    return inner


def read_weights(accelerator: Accelerator, model: nn.Module) -> Named:
    """The state_dict of the model, on the first process."""
    if zero_stage(accelerator) < 3:
        return dict(bare(accelerator, model).state_dict())
    from deepspeed.runtime.zero import GatheredParameters

    weights: Named = saved_buffers(bare(accelerator, model))
    for name, p in bare(accelerator, model).named_parameters():
        with GatheredParameters([p]):  # one by one: the whole model may not fit
            if accelerator.is_main_process:
                weights[name] = p.detach().cpu().clone()
    return weights


def write_weights(accelerator: Accelerator, model: nn.Module, weights: Named) -> None:
    """Give a prepared model other weights, to embed with; under ZeRO the optimizer keeps its own copy.

    weights: of the first process; those of the others are not read.
    """
    module = bare(accelerator, model)
    if zero_stage(accelerator) < 3:
        send_weights(accelerator, module, weights)
        return
    from deepspeed.runtime.zero import GatheredParameters

    for name, p in module.named_parameters():
        with GatheredParameters([p], modifier_rank=0):
            if accelerator.is_main_process:
                p.data.copy_(weights[name])
    send(accelerator, saved_buffers(module), weights)


def send_weights(accelerator: Accelerator, model: nn.Module, weights: Named) -> None:
    """Give a model whose parameters are whole the weights of the first process."""
    send(accelerator, model.state_dict(), weights)


def send(accelerator: Accelerator, targets: Named, values: Named) -> None:
    for name, target in targets.items():
        target.copy_(from_first(accelerator, values, name, target.shape, target.dtype))


def from_first(
    accelerator: Accelerator, values: Named, name: str, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """The tensor that the first process has under a name, on all of them, on their devices."""
    value = values[name] if accelerator.is_main_process else torch.empty(shape)
    sent = value.to(accelerator.device, dtype).contiguous()
    if accelerator.num_processes > 1:
        dist.broadcast(sent, 0)
    return sent


def innermost(optimizer: Any) -> Optimizer:
    """torch's own optimizer inside the wrappers of accelerate and DeepSpeed."""
    while not isinstance(optimizer, Adam | AdamW | SGD):
        optimizer = optimizer.optimizer
    return optimizer


def slot_names(optimizer: Optimizer) -> tuple[str, ...]:
    inner = innermost(optimizer)
    if isinstance(inner, SGD) and not inner.defaults["momentum"]:
        return ()
    return SLOTS[type(inner)]


def slot_keys(model: nn.Module, optimizer: Optimizer) -> list[str]:
    names = slot_names(optimizer)
    return [f"{name}/{slot}" for name, _ in model.named_parameters() for slot in names]


def read_slots(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Named:
    """NAME/slot -> tensor, after the first step, on the first process."""
    if zero_stage(accelerator) in (1, 2):
        link(optimizer)
    slots = {}
    for name, p in bare(accelerator, model).named_parameters():
        for slot in slot_names(optimizer):
            whole = read_slot(accelerator, innermost(optimizer).state[p], p, slot)
            if accelerator.is_main_process:
                slots[f"{name}/{slot}"] = whole.reshape(shape_of(p)).cpu()
    return slots


def read_slot(accelerator: Accelerator, state: Any, p: nn.Parameter, slot: str) -> Tensor:
    if zero_stage(accelerator) == 0:
        # a parameter that never had a gradient has no slots
        value: Tensor = state.get(slot, torch.zeros_like(p))
        return value
    from deepspeed.utils import safe_get_full_optimizer_state

    value = safe_get_full_optimizer_state(p, slot)
    return value


def write_slots(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, slots: Named, step: int
) -> None:
    """Give a new, prepared optimizer the slots that another one had after `step` steps.

    slots: of the first process, which sends them one by one; those of the others are not read.
    """
    stage, inner = zero_stage(accelerator), innermost(optimizer)
    names = slot_names(optimizer)
    remembered: Any = inner.state
    for p in held_parameters(accelerator, model, optimizer):
        remembered[p] = {slot: torch.zeros_like(p) for slot in names}
        if not isinstance(inner, SGD):
            # a fused optimizer counts on the device
            device = p.device if inner.defaults["fused"] else None
            remembered[p]["step"] = torch.tensor(float(step), device=device)
    if stage in (1, 2):
        link(optimizer)
    for name, p in bare(accelerator, model).named_parameters():
        for slot in names:
            value = from_first(accelerator, slots, f"{name}/{slot}", shape_of(p), p.dtype)
            write_slot(accelerator, remembered, p, slot, value)


def write_slot(
    accelerator: Accelerator, state: Any, p: nn.Parameter, slot: str, value: Tensor
) -> None:
    stage = zero_stage(accelerator)
    if stage == 0:
        state[p][slot].copy_(value)
    elif stage < 3:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(p, value, slot)
    else:
        from deepspeed.utils import safe_set_local_optimizer_state

        part, processes = p.ds_tensor.ds_numel, accelerator.num_processes  # type: ignore[attr-defined]
        padded = value.new_zeros(part * processes)
        padded[: value.numel()] = value.flatten()
        own = padded[part * accelerator.process_index :][:part]
        safe_set_local_optimizer_state(p, own, slot)


def held_parameters(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The tensors that torch's optimizer updates: the parameters, or this process's flat parts."""
    stage = zero_stage(accelerator)
    if stage == 0:
        return list(bare(accelerator, model).parameters())
    parts: list[Tensor] = (
        zero(optimizer).fp32_partitioned_groups_flat
        if stage == 3
        else zero(optimizer).single_partition_of_fp32_groups
    )
    return parts


def link(optimizer: Any) -> None:
    """Let DeepSpeed find the slots of every parameter in its flat buffers. By itself it does so once,
    after updating the first group of parameters, and misses the other groups (0.19.8)."""
    zero(optimizer)._hp_optimizer_states_linked = False
    zero(optimizer)._lazy_init_hp_params_optimizer_state()


def zero(optimizer: Any) -> Any:
    """DeepSpeed's optimizer, which stands between accelerate's and torch's."""
    return optimizer.optimizer


def saved_buffers(module: nn.Module) -> Named:
    """The buffers that a state_dict has, which is not all of them."""
    parameters = dict(module.named_parameters())
    return {name: x for name, x in module.state_dict().items() if name not in parameters}


def shape_of(p: Any) -> torch.Size:
    """The full shape: under ZeRO-3 a parameter is empty while it is not in use."""
    shape: torch.Size = getattr(p, "ds_shape", p.shape)
    return shape
