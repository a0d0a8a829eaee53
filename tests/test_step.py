"""Training through accelerate: any number of processes, DDP or DeepSpeed, cached or not."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from batches import batch
from fleet import WORKERS, launch, run

from dml.gpw import GlobalPairLoss, make_loss
from dml.step import backward, update

MS = make_loss("multi_similarity", beta=10, lam=0.5)


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def trained(processes, folder, steps=20, micro_batches=1, dtype="float64"):
    out = Path(folder) / f"{processes}-{micro_batches}-{dtype}.pt"
    run("training.py", processes, out, steps, micro_batches, dtype)
    return torch.load(out)


def difference(a, b):
    return max((a["parameters"][k] - b["parameters"][k]).abs().max() for k in a["parameters"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 3), (2, 1), (2, 3), (4, 1), (4, 2)])
def test_twenty_steps_end_with_the_same_weights(alone, processes, micro_batches, tmp_path):
    other = trained(processes, tmp_path, micro_batches=micro_batches)
    assert difference(alone, other) < 1e-10
    assert other["loss"] == pytest.approx(alone["loss"], rel=1e-10)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Five steps under DDP, by the shipped configuration for two CPU processes."""
    folder = tmp_path_factory.mktemp("ddp")
    for k in (1, 2):
        arguments = [WORKERS / "training.py", folder / f"{k}.pt", 5, k, "float32"]
        done = launch("--config_file", "configs/accelerate/cpu_x2.yaml", *arguments)
        assert done.returncode == 0, done.stderr
    return {k: torch.load(folder / f"{k}.pt") for k in (1, 2)}


def test_micro_batches_are_reduced_once(ddp):
    assert ddp[1]["reductions"] == ddp[2]["reductions"] == ["all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_deepspeed_trains_what_ddp_trains(ddp, stage, micro_batches, tmp_path):
    arguments = [WORKERS / "training.py", tmp_path / "out.pt", 5, micro_batches, "float32"]
    config = f"configs/accelerate/zero{stage}.yaml"
    done = launch("--config_file", config, "--num_processes", 2, *arguments, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
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


@pytest.mark.parametrize("micro_batch", [None, 10])
def test_bf16_for_the_model_and_float32_for_the_loss(micro_batch):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    try:
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
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
