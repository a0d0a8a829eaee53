"""Training through accelerate: any number of processes, DDP or DeepSpeed, cached or not."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from accelerate import Accelerator
from accelerate.commands.launch import launch_command, launch_command_parser
from batches import batch
from fleet import ROOT, WORKERS, launch, run

from dml.errors import NotFiniteError
from dml.gpw import GlobalPairLoss, GlobalProxyLoss, make_loss
from dml.step import backward, update
from launch.zero import accelerate_variables

MS = make_loss("multi_similarity", beta=10, lam=0.5)


@pytest.fixture
def accelerator(fresh_accelerate):
    return Accelerator(cpu=True)


def difference(a, b):
    return max((a["parameters"][k] - b["parameters"][k]).abs().max() for k in a["parameters"])


def read(folder):
    """Micro-batches -> what the worker training.py wrote."""
    return {int(path.stem): torch.load(path) for path in folder.glob("*.pt")}


CASES = {1: (1, 3), 2: (1, 3), 4: (1, 2)}  # processes: numbers of micro-batches


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(processes, micro-batches) -> twenty steps in float64, with one launch per group."""
    known = {}
    for processes, micro_batches in CASES.items():
        folder = tmp_path_factory.mktemp("trained")
        run("training.py", processes, folder, 20, "float64", *micro_batches)
        known |= {(processes, k): found for k, found in read(folder).items()}
    return known


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", [(n, k) for n, micro_batches in CASES.items() for k in micro_batches if n + k > 2]
)
def test_twenty_steps_end_with_the_same_weights(trained, case):
    alone, other = trained[1, 1], trained[case]
    assert difference(alone, other) < 1e-10
    assert other["loss"] == pytest.approx(alone["loss"], rel=1e-10)


FIVE_STEPS = (5, "float32", 1, 2)  # with one and with two micro-batches


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    config = "configs/accelerate/cpu_x2.yaml"
    done = launch("--config_file", config, WORKERS / "training.py", folder, *FIVE_STEPS)
    assert done.returncode == 0, done.stderr
    return read(folder)


@pytest.fixture(scope="module", params=[1, 2, 3])
def zero(request, tmp_path_factory):
    """The stage of DeepSpeed's ZeRO, and what it trains by the shipped configuration."""
    folder, stage = tmp_path_factory.mktemp("zero"), request.param
    variables = {**accelerate_variables(shipped(stage)), "DS_ACCELERATOR": "cpu"}
    run("training.py", 2, folder, *FIVE_STEPS, variables=variables)
    return stage, read(folder)


def shipped(stage):
    return str(ROOT / f"configs/accelerate/zero{stage}.yaml")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_variables_of_deepspeed_are_those_that_accelerate_sets(stage, monkeypatch):
    """Oracle: `accelerate launch`, up to where it would start the processes."""
    sets = {}
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.distributed.run, "run", lambda _: sets.update(os.environ))
    launch_command(launch_command_parser().parse_args(["--config_file", shipped(stage), "x.py"]))
    ours = accelerate_variables(shipped(stage))
    file = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    assert Path(ours.pop(file)).samefile(sets.pop(file))
    assert ours.items() <= sets.items()
    others = {name for name in sets if name.startswith("ACCELERATE_DEEPSPEED")} - ours.keys()
    assert others == set(), "which a run would lack"


@pytest.mark.processes
def test_micro_batches_are_reduced_once(ddp):
    assert ddp[1]["reductions"] == ddp[2]["reductions"] == ["all_reduce"]


@pytest.mark.processes
@pytest.mark.timeout(600)  # the first launch compiles
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_deepspeed_trains_what_ddp_trains(ddp, zero, micro_batches):
    stage, found = zero[0], zero[1][micro_batches]
    assert difference(found, ddp[micro_batches]) == 0
    # the gradient once, however many micro-batches, and then whether any process overflowed
    assert found["reductions"] == [
        "reduce_scatter_tensor" if stage == 3 else "all_reduce",
        "all_reduce",
    ]
    assert difference(found, ddp[1]) < 1e-6


def test_cached_step_returns_the_loss_and_leaves_no_gradient(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images, labels = batch(m=30)
    expected = GlobalPairLoss(MS)(model(images), labels)
    before = model.weight.detach().clone()
    done = update(accelerator, model, GlobalPairLoss(MS), optimizer, images, labels, 7)
    assert done.loss == pytest.approx(expected.item(), rel=1e-12)
    assert model.weight.grad is None
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("in_gradient", [True, False])
def test_a_step_that_is_not_finite_is_never_applied(accelerator, bad, in_gradient):
    """Neither if the loss is not finite, nor if only its gradient is not."""

    def loss_fn(X, labels):
        value = GlobalPairLoss(MS)(X, labels)
        X.register_hook(lambda g: g * (bad if in_gradient else 1))
        return value + (0 if in_gradient else bad)

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    prepared = []
    with pytest.raises(NotFiniteError, match=r"the loss is \S+ and its gradient's norm \S+"):
        update(
            accelerator,
            model,
            loss_fn,
            optimizer,
            *batch(m=30),
            meanwhile=lambda: prepared.append(1),
        )
    assert torch.equal(model.weight, before)
    assert prepared == [1]  # the next batch was prepared while the GPU worked


@pytest.mark.parametrize("where", ["embeddings", "proxies"])
def test_a_step_that_is_not_finite_leaves_weights_and_proxies(accelerator, where):
    """Also if the gradient of the proxies alone is not."""
    X, labels = batch(m=30)
    labels = labels % 12
    model = torch.nn.Linear(8, 8).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_fn = GlobalProxyLoss(make_loss("proxy_anchor"), 12, 8).double()
    of_loss = torch.optim.Adam(loss_fn.parameters(), lr=0.1)

    def step(bad):
        if bad and where == "embeddings":
            return update(accelerator, model, loss_fn, optimizer, X * torch.nan, labels)
        if bad:
            with torch.no_grad():
                loss_fn.proxies[3] = 1e-320  # its direction has an infinite slope
        given = accelerator, model, loss_fn, optimizer, X, labels
        return update(*given, loss_optimizer=of_loss)

    before = model.weight.detach().clone()
    step(bad=False)
    assert not torch.equal(model.weight, before)
    before, proxies = model.weight.detach().clone(), loss_fn.proxies.detach().clone()
    with pytest.raises(NotFiniteError):
        step(bad=True)
    assert torch.equal(model.weight, before)
    if where == "embeddings":
        assert torch.equal(loss_fn.proxies, proxies)
    else:
        assert loss_fn.proxies[3, 0] == 1e-320
        assert torch.equal(loss_fn.proxies[4:], proxies[4:])


def test_the_graph_of_one_micro_batch_is_alive_at_a_time(accelerator):
    """The point of caching: count activations that autograd saved and has not freed."""
    alive = peak = 0

    def pack(x):
        nonlocal alive, peak
        alive += x.numel()
        peak = max(peak, alive)
        return x.clone()

    def free(x):
        nonlocal alive
        alive -= x.numel()
        return x

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(8, 400), torch.nn.Linear(400, 8)

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(pack, free):
                return self.outer(self.inner(x).tanh())

    torch.manual_seed(0)
    images, labels = batch(m=40, dtype=torch.float32)
    model = accelerator.prepare(Wide())
    backward(accelerator, model, GlobalPairLoss(MS), images, labels)
    plain, peak, alive = peak, 0, 0
    backward(accelerator, model, GlobalPairLoss(MS), images, labels, 5)
    assert peak < plain / 4


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("micro_batch", [None, 10])
def test_bf16_for_the_model_and_float32_for_the_loss(micro_batch):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.linear(x)
            seen.append(hidden.dtype)
            return torch.nn.functional.normalize(hidden.float(), dim=1)

    def loss_fn(X, labels):
        seen.append(X.dtype)
        return GlobalPairLoss(MS)(X, labels)

    images, labels = batch(m=30, dtype=torch.float32)
    model = accelerator.prepare(Model())
    loss, _ = backward(accelerator, model, loss_fn, images, labels, micro_batch)
    assert set(seen) == {torch.bfloat16, torch.float32}
    assert seen.count(torch.float32) == 1
    assert loss.dtype == torch.float32
    assert model.linear.weight.grad.dtype == torch.float32
