"""A step on a GPU, as far as it can be known without one: on a device that keeps a GPU's rules, and with
stand-ins for torch.cuda. Oracle: the same step on the CPU."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from fleet import ROOT, WORKERS, environment
from torch.utils._python_dispatch import TorchDispatchMode

from dml.config import Data, Engine, Model, Optim
from dml.data.copies import DeviceCopies
from dml.data.vectors import Features
from dml.distributed import processes
from dml.distributed.precision import full_precision
from dml.distributed.processes import own_gpu, set_numerics
from dml.errors import LaunchError
from dml.models import BACKBONES, Embedder, make_model
from dml.optim import make_optimizer
from dml.run_folder.clock import Clock

CUDA = torch.device("cuda", 0)


def of_worker(name):
    """What a worker prints; the fake device is registered for a whole process."""
    done = subprocess.run(
        [sys.executable, str(WORKERS / name)],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def steps():
    return of_worker("gpu_step.py")


@pytest.mark.parametrize("micro_batch", ["None", "8", "3"])
def test_a_step_on_the_device_is_that_of_the_cpu(steps, micro_batch):
    """Plain, and cached in three and eight micro-batches; in float64."""
    found = steps[micro_batch]
    for (loss, norm), expected in zip(found["found"], found["expected"], strict=True):
        assert [loss, norm] == pytest.approx(expected, rel=1e-10)
    assert found["weights_apart"] < 1e-10


@pytest.mark.parametrize("micro_batch", ["None", "8", "3"])
def test_a_step_waits_for_the_device_at_most_twice(steps, micro_batch):
    """From the second step on, whatever the number of micro-batches."""
    waits = steps[micro_batch]["waits"]
    assert waits
    assert all(1 <= sum(step.values()) <= 2 for step in waits), waits


def test_the_next_batch_is_loaded_while_the_device_works():
    """50 ms on the device and 40 ms in the loader: one after the other they would take 90 ms."""
    milliseconds = of_worker("overlap.py")
    assert max(milliseconds) < 60


# ---- stand-ins for torch.cuda -----------------------------------------------------------------------


class Event:
    """An event of a GPU whose time a test sets. The GPU is behind: nothing is done before `synchronize`."""

    now, synchronised = 0.0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = Event.now

    def query(self):
        return Event.synchronised > 0

    def synchronize(self):
        Event.synchronised += 1

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


def test_the_clock_of_a_gpu_waits_at_log_lines_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("the host waits"))
    clock = Clock(CUDA)
    for _ in range(3):
        for phase, seconds in (("forward", 2.0), ("data", 0.0), ("optimizer", 0.5)):
            with clock(phase):
                Event.now += seconds
        clock.steps += 1
    assert Event.synchronised == 0
    timing = clock.timing(batch_size=10, bytes_sent=6)
    assert Event.synchronised == 1
    assert timing["seconds_forward"] == 2.0
    assert timing["seconds_data"] == 0.0
    assert timing["images_per_second"] == 4.0
    assert timing["memory_bytes"] == 7
    with clock("forward"):  # what is done is added up at once, so events do not pile up
        Event.now += 1.0
    assert not clock.events


class Stream:
    """What is asked of the streams, in order."""

    said: ClassVar[list[str]] = []

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        Stream.said.append(f"on {self.name}")

    def __exit__(self, *_):
        Stream.said.append("back")

    def wait_stream(self, other):
        Stream.said.append(f"{self.name} waits for {other.name}")


class OnGPU:
    def to(self, device, non_blocking):
        assert (device, non_blocking) == (CUDA, True)
        Stream.said.append("copy")
        return self

    def record_stream(self, stream):
        Stream.said.append(f"used on {stream.name}")


def test_copies_have_a_stream_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    copies = DeviceCopies(CUDA)
    batch = copies.begin([OnGPU()])
    assert Stream.said == ["on side", "copy", "back"]
    copies.end(batch)
    assert Stream.said[3:] == ["main waits for side", "used on main"]


def test_copies_on_a_cpu_are_the_tensors_themselves():
    copies, x = DeviceCopies(torch.device("cpu")), torch.ones(3)
    (y,) = copies.begin([x])
    copies.end([y])
    assert y is x


# ---- which GPU a process has -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "local_rank", "local", "own"),
    [
        (8, "3", "8", 3),
        (8, "3", None, 3),  # a launcher that does not say how many there are
        (1, "3", "8", 0),  # bound by the site: this process sees its own GPU only
        (1, "0", "1", 0),
        (4, "1", "2", 1),
    ],
)
def test_a_process_takes_its_own_gpu(visible, local_rank, local, own, monkeypatch):
    launched_as(monkeypatch, local_rank, local)
    assert own_gpu(visible) == own


def launched_as(monkeypatch, local_rank, local):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)


@pytest.mark.parametrize("local_rank", ["0", "7"])
def test_too_few_gpus_are_refused(local_rank, monkeypatch):
    launched_as(monkeypatch, local_rank, "8")
    with pytest.raises(
        LaunchError, match=r"8 processes .* need 8 GPUs, but 4 are visible; start 4 "
    ):
        own_gpu(4)


def test_accelerate_is_told_the_gpu(monkeypatch):
    """Its device, DDP's and DeepSpeed's follow LOCAL_RANK."""
    launched_as(monkeypatch, "3", "8")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(processes, "Accelerator", lambda **_: told.append(os.environ["LOCAL_RANK"]))
    told = []
    with pytest.raises(AttributeError):  # this is no Accelerator
        processes.make_accelerator()
    assert told == ["0"]


def test_processes_that_cannot_reach_each_other_are_told_what_to_set(monkeypatch):
    def refused(**_):
        raise RuntimeError("Gloo connectFullMesh failed\nat some line")

    monkeypatch.setattr(torch.distributed, "new_group", refused)
    with pytest.raises(
        LaunchError, match=r"\(Gloo connectFullMesh failed\); set GLOO_SOCKET_IFNAME"
    ):
        processes.control_group()


# ---- settings ---------------------------------------------------------------------------------------


@pytest.fixture
def numerics():
    """torch's settings are restored."""
    yield
    set_numerics(Engine())
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_for_the_model_and_never_for_similarities(tf32):
    set_numerics(Engine(tf32=tf32))
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    for _ in range(2):
        assert (cuda.matmul.allow_tf32, cudnn.allow_tf32) == (tf32, tf32)
        assert cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
        assert (cudnn.conv.fp32_precision == "tf32") == tf32
        with full_precision(CUDA):
            assert cuda.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("numerics")
def test_deterministic_runs_choose_no_algorithm_by_its_time(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_numerics(Engine())
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    set_numerics(Engine(deterministic=True))
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op._schema.name.removeprefix("aten::"))
        return op(*args, **(kwargs or {}))


# Of those for which torch.use_deterministic_algorithms raises an error on CUDA, what a network could use.
REFUSED = {"_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "cumsum", "histc"}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_our_backbones_have_deterministic_algorithms(backbone):
    data = Data(dataset="folder", shards="none", size=64)
    model = make_model(Model(backbone=backbone, embedding_size=8), data, seed=0)
    with Operations() as used:
        model(torch.zeros(2, 64, 64, 3, dtype=torch.uint8)).sum().backward()
    assert "convolution_backward" in used.names
    assert not used.names & REFUSED


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_optimizers_are_fused(name):
    """Oracle: the plain ones."""
    made = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = Embedder(torch.nn.Linear(4, 3), 3, 2, Features(4), "frozen")
        optimizer = make_optimizer(Optim(name=name, lr=0.1), model)
        assert optimizer.defaults["fused"]
        for group in optimizer.param_groups:
            group["fused"] = fused
        for step in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model.head(model.backbone(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append([*model.backbone.parameters(), *model.head.parameters()])
    for a, b in zip(*made, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
