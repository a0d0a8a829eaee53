"""A device that is no GPU but keeps a GPU's rules, for programs that were never on one.

Its tensors hold CPU data. It refuses operations that mix devices, counts where the host would wait for
the device and how many kernels would be launched. torch registers it for the whole process, so use it
in a process of its own (tests/workers):

    with FakeGPU() as gpu:
        x = torch.randn(3, 2).to("fakegpu")
        (x @ x.T).sum().item()
    gpu.waits, gpu.launches                # Counter of "file:line operation"; Counter of operations
    gpu.unordered                          # those of floats whose last bits CUDA does not fix

FakeGPU(shapes_only=True) computes nothing: a batch of 65,536 costs no time, and `item` is always 1.
"""

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
WAITS = {"_local_scalar_dense", "equal", "nonzero", "unique_consecutive", "_unique2", "unique_dim"}
WAITS |= {"masked_select", "bincount", "unique_dim_consecutive"}
COPIES = {"_to_copy", "copy_"}
# Of floats, CUDA gives them in any order. torch has a slower, reproducible way for the first, and for
# the second raises an error if that is asked for (torch.use_deterministic_algorithms).
ATOMIC = {"index_add", "scatter_add", "scatter_reduce"}
NEVER_REPRODUCIBLE = {"histc", "cumsum", "put", "bincount"}
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
OURS = str(Path(__file__).parents[1] / "dml") + "/"

_setup_privateuseone_for_python_backend(NAME)


class GpuTensor(torch.Tensor):
    """A tensor of the device; `inner` is the CPU's, or one of the meta device with shapes only."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{NAME}:0",
        )
        self.inner = inner
        return self

    def new_tensor(self, data):
        """torch copies from memory that is not pinned, and waits."""
        current().wait("new_tensor")
        return GpuTensor(self.inner.new_tensor(data))

    def tolist(self):
        current().wait("tolist")
        return self.inner.tolist()

    def __repr__(self):
        return f"GpuTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return current().run(op, args, kwargs or {})


ACTIVE = []


def current():
    assert ACTIVE, "tensors of the fake GPU live inside `with FakeGPU():`"
    return ACTIVE[-1]


class FakeGPU(TorchDispatchMode):
    """Also sees what is made on the device from nothing: torch.arange(..., device="fakegpu")."""

    def __init__(self, shapes_only=False):
        super().__init__()
        self.shapes_only = shapes_only
        self.waits, self.launches, self.unordered = Counter(), Counter(), Counter()

    def __enter__(self):
        ACTIVE.append(self)
        # Wrapped tensors cannot be made in inference mode.
        self.inference_mode, torch.inference_mode = torch.inference_mode, torch.no_grad
        return super().__enter__()

    def __exit__(self, *problem):
        torch.inference_mode = self.inference_mode
        ACTIVE.pop()
        return super().__exit__(*problem)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.run(op, args, kwargs or {})

    def put(self, x):
        return x.to(NAME)

    def reset(self):
        self.waits.clear()
        self.unordered.clear()
        self.launches.clear()

    def wait(self, what):
        """Count a wait under the line of dml that caused it."""
        frame = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        where = (
            "" if frame is None else f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno} "
        )
        self.waits[where + what] += 1

    def run(self, op, args, kwargs):
        name, device = known(op).name, kwargs.get("device")
        tensors = [x for x in leaves([*args, *kwargs.values()]) if isinstance(x, torch.Tensor)]
        fake = [x for x in tensors if isinstance(x, GpuTensor)]
        cpu = [x for x in tensors if not isinstance(x, GpuTensor) and x.ndim]
        on_gpu = bool(fake) if device is None else torch.device(device).type == NAME
        if name == "copy_":
            on_gpu = isinstance(args[0], GpuTensor)
        if fake and cpu and name not in COPIES:
            raise RuntimeError(f"{op} mixes devices: {[tuple(x.shape) for x in cpu]} on the CPU")
        if fake or on_gpu:
            self.note(name, op, args, kwargs, bool(cpu) or not on_gpu, on_gpu)
        if self.shapes_only and name == "_local_scalar_dense" and fake:
            return 1
        return self.compute(op, args, kwargs, fake, on_gpu)

    def note(self, name, op, args, kwargs, crosses, on_gpu):
        booleans = name.startswith("index") and any(
            getattr(i, "dtype", None) == torch.bool for i in leaves(args[1])
        )
        waiting_copy = name in COPIES and crosses and not asynchronous(op, args, kwargs)
        if name in WAITS or booleans or waiting_copy:
            self.wait(name)
        if (
            on_gpu
            and name.rstrip("_") in ATOMIC | NEVER_REPRODUCIBLE
            and args[0].is_floating_point()
        ):
            self.unordered[name.rstrip("_")] += 1
        if on_gpu and not known(op).view and name not in ALLOCATIONS:
            self.launches[name] += 1

    def compute(self, op, args, kwargs, fake, on_gpu):
        where = "meta" if self.shapes_only and on_gpu else "cpu"
        own = {id(x.inner): x for x in fake}

        def unwrap(x):
            if isinstance(x, GpuTensor):  # with values, if it was kept from before shapes_only
                return x.inner.to("meta") if where == "meta" else x.inner
            if where == "meta" and isinstance(x, torch.Tensor) and x.ndim:
                return x.to("meta")
            return x

        inner_args = mapped(unwrap, args)
        inner_kwargs = {key: mapped(unwrap, x) for key, x in kwargs.items()}
        if kwargs.get("device") is not None:
            inner_kwargs["device"] = where
        result = op(*inner_args, **inner_kwargs)

        def wrap(y):
            if not isinstance(y, torch.Tensor) or not on_gpu:
                return y
            return own[id(y)] if id(y) in own else GpuTensor(y)

        return mapped(wrap, result)


class Known(NamedTuple):
    """Of an operation: its name, whether it returns a view, and the names of its arguments."""

    name: str
    view: bool
    arguments: list[str]


@cache
def known(op):
    """torch makes a schema anew whenever it is asked for."""
    schema = op._schema
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    arguments = [argument.name for argument in schema.arguments]
    return Known(schema.name.removeprefix("aten::"), view, arguments)


def leaves(x):
    """What is in a list, or the thing itself; torch's own trees take ten times as long."""
    return [leaf for each in x for leaf in leaves(each)] if isinstance(x, list | tuple) else [x]


def mapped(f, x):
    """f of all leaves, in lists and tuples as before."""
    return type(x)([mapped(f, each) for each in x]) if isinstance(x, list | tuple) else f(x)


def asynchronous(op, args, kwargs):
    """Whether a copy has non_blocking=True."""
    names = known(op).arguments
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("non_blocking"))
