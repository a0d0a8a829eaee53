"""The processes of a run: the one place that makes the Accelerator.

    dml train --processes 8                                              eight, on GPUs or CPU cores
    accelerate launch dml/train.py                                       one process
    accelerate launch --multi_gpu --num_processes 8 dml/train.py         eight
    accelerate launch --config_file configs/accelerate/zero2.yaml ...    DeepSpeed

When accelerate finds no GPU it falls back, silently, to independent trainings of one process each. Here
the program decides, and refuses to start when the processes do not form one group.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml.config import Engine
from dml.distributed.malloc import keep_freed_memory
from dml.errors import LaunchError
from shards.cores import available_cores

TIME_OUT = timedelta(minutes=10)  # a process that waits longer for the others gives up


@dataclass
class DDPOptions(DistributedDataParallelKwargs):  # type: ignore[misc]
    """An option of torch that accelerate does not know yet; its `broadcast_buffers` is deprecated."""

    forward_sync_buffers: bool | None = None


def make_accelerator(precision: str = "fp32") -> Accelerator:
    """The Accelerator for this process. precision: fp32, fp64, or bf16 for the model (never the loss)."""
    on_cpu = not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not on_cpu:
        # accelerate, DDP and DeepSpeed all take the GPU of this number
        os.environ["LOCAL_RANK"] = str(own_gpu(torch.cuda.device_count()))
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=TIME_OUT)
    accelerator = Accelerator(
        cpu=on_cpu and not deepspeed,  # with cpu=True accelerate would drop DeepSpeed silently
        mixed_precision="bf16" if precision == "bf16" and not deepspeed else "no",
        kwargs_handlers=[group] if launched > 1 or deepspeed else [],
    )
    # Frozen statistics never change and synchronised ones are equal: there is nothing to broadcast.
    # Gradients live in DDP's buckets, so they are not copied there.
    accelerator.ddp_handler = DDPOptions(forward_sync_buffers=False, gradient_as_bucket_view=True)
    if accelerator.num_processes != launched:
        raise LaunchError(
            f"{launched} processes were launched but accelerate formed a group of "
            f"{accelerator.num_processes}, which would train {launched} independent models; "
            "launch with `accelerate launch --multi_gpu --num_processes "
            f"{launched}` or torchrun, without --cpu and without ACCELERATE_USE_CPU"
        )
    if deepspeed and accelerator.distributed_type is not DistributedType.DEEPSPEED:
        raise LaunchError(
            "DeepSpeed was asked for but accelerate dropped it; launch without --cpu and without "
            "ACCELERATE_USE_CPU"
        )
    if deepspeed and precision == "fp64":
        raise LaunchError(
            "DeepSpeed has no float64; launch without it, or set engine.precision=fp32"
        )
    if deepspeed:
        # DeepSpeed's own bf16 would convert the parameters and expect bf16 images; this is autocast.
        # The modules listed here would be gathered, and their gradients reduced, in bf16.
        accelerator.state.deepspeed_plugin.deepspeed_config["torch_autocast"] = {
            "enabled": precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    if on_cpu:
        keep_freed_memory()
        torch.set_num_threads(own_cores(int(os.environ.get("LOCAL_WORLD_SIZE", launched))))
    return accelerator


def own_gpu(visible: int) -> int:
    """The number of this process's GPU among the visible ones, or LaunchError if they are too few.

    Where Slurm (--gpus-per-task) or a site binds a GPU to each process, a process sees only its own.
    """
    if visible == 1:
        return 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if visible < processes:
        raise LaunchError(
            f"{processes} processes on this machine need {processes} GPUs, but {visible} are visible; "
            f"start {visible} processes, or see to CUDA_VISIBLE_DEVICES and the job's GPUs"
        )
    return local_rank


def control_group() -> Any:
    """A group of all processes that talk on the CPU, beside the group that sends tensors."""
    try:
        return dist.new_group(backend="gloo", timeout=TIME_OUT)
    except RuntimeError as error:
        raise LaunchError(
            f"the processes cannot reach each other by gloo ({str(error).splitlines()[0]}); set "
            "GLOO_SOCKET_IFNAME to the network interface that joins the machines, such as eth0"
        ) from error


def refuse_shared_gpus(group: Any) -> None:
    """LaunchError on all processes if two of them have the same GPU."""
    gpus: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(gpus, gpu_id(), group=group)
    shared = [gpu for gpu, count in Counter(gpus).items() if count > 1]
    if shared:
        ranks = [rank for rank, gpu in enumerate(gpus) if gpu == shared[0]]
        raise LaunchError(
            f"the processes {', '.join(map(str, ranks))} would share one GPU ({shared[0]}); start one "
            "process per GPU, or see to CUDA_VISIBLE_DEVICES and the job's GPUs"
        )


def gpu_id() -> str:
    """The same for the same GPU, on any machine."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def set_numerics(engine: Engine) -> None:
    """How the model is computed on a GPU. (Similarities are always in float32: precision.py.)

    Without `deterministic` cuDNN times its algorithms and keeps the fastest, so that the last bits of
    two starts of a run may differ.
    """
    backends: Any = torch.backends
    # By these names, which torch.compile reads: setting the newer `fp32_precision` would make it fail.
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = engine.tf32
    backends.cudnn.benchmark = not engine.deterministic
    torch.use_deterministic_algorithms(engine.deterministic)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # it finds bugs, and takes time
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product


def became_one() -> bool:
    """Whether `accelerate launch --num_processes N` started this process alone, as it does without
    --multi_gpu where there is no GPU. It names the group's address then, but no rank."""
    environment = os.environ
    launched = any(name.startswith("ACCELERATE_") for name in environment)
    return launched and "MASTER_ADDR" in environment and "RANK" not in environment


def leave_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def own_cores(local: int) -> int:
    """The number of cores for each of `local` processes on this machine. (Launchers set one thread.)"""
    cores = available_cores()
    slurm = os.environ.get("SLURM_CPUS_PER_TASK")  # one task per process, bound to its cores or not
    return min(cores, int(slurm)) if slurm else max(1, cores // local)


def settle_buckets(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Let DDP settle the layout of its buckets before the first step.

    DDP reorders them after the first backward. With three or more processes the last bits of a
    gradient's sum depend on its position in a bucket, so a resumed run, which would start with the
    first layout again, would differ from an uninterrupted one.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.eval()  # statistics of BatchNorm stay as they are
    for _ in range(2):
        found = model(*inputs)
        embeddings = [found] if isinstance(found, Tensor) else found
        torch.autograd.backward([0 * x.sum() for x in embeddings])
    model.zero_grad()
    model.train()  # type: ignore[no-untyped-call]
