"""ZeRO 1 to 3 train what DDP trains, and the weights that are saved are the fp32 masters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.functional import normalize

from dml.distributed.full_state import bare, read_weights
from dml.distributed.processes import make_accelerator
from dml.gpu_check.exact import relative
from dml.gpu_check.place import Place
from dml.gpu_check.verdict import FAILED, OK, SKIPPED, Line
from dml.gpw import GlobalPairLoss, make_loss
from dml.step import update
from launch.zero import STAGES, deepspeed_variables, search_path

STEPS = 3
# How far apart weights may be, as a share of the largest: the order of a sum depends on the stage.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


class Model(nn.Module):
    """One weight is larger than those that ZeRO-3 keeps whole on every process (100,000 numbers)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.layers(x).float(), dim=1)


def zero_lines(place: Place) -> Iterator[Line]:
    """DeepSpeed takes one model per Accelerator: this check makes its own."""
    missing = [name for name in ("deepspeed", "transformers") if find_spec(name) is None]
    if missing:
        why = f"{missing[0]} is not installed; pip install deepspeed transformers ninja"
        yield from (Line(f"ZeRO-{stage[-1]}", SKIPPED, why) for stage in STAGES)
        return
    plain = {precision: train(place, precision)[0] for precision in TOLERANCE}
    if place.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = search_path()
    for stage in STAGES:
        os.environ.update(deepspeed_variables(stage))
        trained = {precision: train(place, precision) for precision in TOLERANCE}
        yield stage_line(f"ZeRO-{stage[-1]}", plain, trained)
    for name in deepspeed_variables(STAGES[0]):
        del os.environ[name]


def stage_line(
    name: str,
    plain: dict[str, dict[str, Tensor]],
    trained: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]],
) -> Line:
    """plain: weights by precision, under DDP. trained: weights and masters, under DeepSpeed."""
    errors, rounded = {}, []
    for precision, (weights, masters) in trained.items():
        expected = plain[precision]
        errors[precision] = max(
            (relative(x, expected[k].double()) for k, x in weights.items()), default=0.0
        )
        rounded += [k for k, x in weights.items() if not torch.equal(x.cpu(), masters[k].cpu())]
    apart = ", ".join(f"{error:.1e} in {precision}" for precision, error in errors.items())
    if rounded:
        text = f"saved weights are not the fp32 masters: {', '.join(rounded)}"
        return Line(name, FAILED, text, {"errors": errors})
    good = all(error <= TOLERANCE[precision] for precision, error in errors.items())
    text = f"weights within {apart} of DDP; what is saved is the fp32 masters to the bit"
    return Line(name, OK if good else FAILED, text, {"errors": errors, "goal": TOLERANCE})


def train(place: Place, precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after some steps and an evaluation, and DeepSpeed's masters; on the first process."""
    AcceleratorState._reset_state()
    accelerator = make_accelerator(precision)
    here = Place(accelerator, place.sizes)
    raw = Model()
    prepared = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    model: Any = prepared[0]
    m = 20 * here.size
    images = torch.randn(m, 12, generator=torch.Generator().manual_seed(1))
    own = here.own(images), here.own(torch.arange(m) % (m // 4))
    loss_fn = GlobalPairLoss(make_loss("multi_similarity", beta=10.0, lam=0.5))
    for _ in range(STEPS):
        update(accelerator, model, loss_fn, prepared[1], *own)
    model.eval()
    with torch.no_grad():
        model(own[0])
    model.train()
    weights = {k: x.detach().clone() for k, x in read_weights(accelerator, model).items()}
    masters = {}
    if accelerator.state.deepspeed_plugin is not None:
        from deepspeed.utils import safe_get_full_fp32_param

        parameters = bare(accelerator, model).named_parameters()
        masters = {name: safe_get_full_fp32_param(p).clone() for name, p in parameters}
    return (weights, masters) if here.rank == 0 else ({}, {})
