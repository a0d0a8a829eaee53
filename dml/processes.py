"""The processes of a run: the one place that makes the Accelerator.

    accelerate launch dml/train.py                                       one process
    accelerate launch --multi_gpu --num_processes 8 dml/train.py         eight, on GPUs or CPU cores
    accelerate launch --config_file configs/accelerate/zero2.yaml ...    DeepSpeed

accelerate alone falls back to independent trainings of one process each when it finds no GPU; here
the program decides, and refuses to go on when the processes do not know each other.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType


@dataclass
class DDPOptions(DistributedDataParallelKwargs):  # type: ignore[misc]
    """accelerate does not know this option of torch's yet; its `broadcast_buffers` is deprecated."""

    forward_sync_buffers: bool | None = None


class LaunchError(RuntimeError):
    """The processes were not started as one run."""


def make_accelerator(precision: str = "fp32", timeout_minutes: float = 10) -> Accelerator:
    """The Accelerator for this process. precision: fp32, or bf16 for the model (never the loss).

    A process that waits longer than the time-out for the others gives up.
    """
    on_cpu = not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    group = InitProcessGroupKwargs(
        backend="gloo" if on_cpu else "nccl", timeout=timedelta(minutes=timeout_minutes)
    )
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,  # with cpu=True accelerate would drop DeepSpeed silently
        mixed_precision="bf16" if precision == "bf16" and not deepspeed else "no",
        kwargs_handlers=[group] if launched > 1 or deepspeed else [],
    )
    # Frozen statistics never change, synchronised ones are equal: nothing to broadcast.
    accelerator.ddp_handler = DDPOptions(forward_sync_buffers=False)
    if accelerator.num_processes != launched:
        raise LaunchError(
            f"{launched} processes were launched but accelerate formed a group of "
            f"{accelerator.num_processes}, which would train {launched} models that know nothing of "
            "each other; launch with `accelerate launch --multi_gpu --num_processes "
            f"{launched}` or torchrun, without --cpu and without ACCELERATE_USE_CPU"
        )
    if deepspeed and accelerator.distributed_type is not DistributedType.DEEPSPEED:
        raise LaunchError(
            "DeepSpeed was asked for but accelerate dropped it; launch without --cpu and without "
            "ACCELERATE_USE_CPU"
        )
    if deepspeed:
        # DeepSpeed's own bf16 would turn the parameters and expect bf16 images; this is autocast.
        accelerator.state.deepspeed_plugin.deepspeed_config["torch_autocast"] = {
            "enabled": precision == "bf16",
            "dtype": "bfloat16",
        }
    if on_cpu:
        # Launchers set one thread a process; share the cores instead.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
        linux = sys.platform == "linux"  # where a job may have only some of the cores
        cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local))
    return accelerator
