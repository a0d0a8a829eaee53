"""Losses, retrieval and training on a device against float64 on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dml.catalogue import MINING_SETTLED, PRESETS
from dml.gpu_check.place import Place, Sizes
from dml.gpu_check.verdict import SKIPPED, Line, within
from dml.gpw import LOSSES, GlobalPairLoss, dense_loss, make_loss
from dml.gpw.global_loss import triton_problem
from dml.gpw.weighting import PairLoss
from dml.recall import recall_at_k
from dml.step import update

# Of a loss, and of the length of a gradient: a pair at the edge of mining, or of a histogram's bin, may
# change its entry, not the whole.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
KS = (1, 10)


def variants() -> dict[str, PairLoss]:
    """Every loss with its defaults, mined where it can be, and the two published multi-similarities."""
    found = {name: make_loss(name) for name in LOSSES}
    mined = [name for name in LOSSES if name not in MINING_SETTLED]
    found |= {f"{name}, mined": make_loss(name, mine=True) for name in mined}
    for name, values in PRESETS.items():
        found[f"multi_similarity of {name}"] = make_loss("multi_similarity", **values)
    return found


def batch(m: int, d: int, classes: int) -> tuple[Tensor, Tensor]:
    """Unit vectors around the centres of their classes, on the CPU, so far apart that every loss has
    pairs to learn from."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (m,), generator=generator)
    centres = torch.randn(classes, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(m, d, generator=generator, dtype=torch.float64)
    X = normalize(centres[labels], dim=1) + 2 * normalize(noise, dim=1)
    return normalize(X, dim=1), labels


def loss_lines(device: torch.device, sizes: Sizes) -> Iterator[Line]:
    X, y = batch(sizes.rows, sizes.dimensions, sizes.rows // 5)
    expected = {}
    for name, loss in variants().items():
        # what a device gets: the reference sees the same rounded numbers
        x = X.float().double().requires_grad_()
        value = dense_loss(loss, x, y)
        expected[name] = value.detach(), torch.autograd.grad(value, x)[0]
    for kind, dtype in (
        ("streaming", torch.float64),
        ("streaming", torch.float32),
        ("triton", torch.float32),
    ):
        yield losses_line(device, kind, dtype, X, y, expected)


def losses_line(
    device: torch.device,
    kind: Any,
    dtype: torch.dtype,
    X: Tensor,
    y: Tensor,
    expected: dict[str, tuple[Tensor, Tensor]],
) -> Line:
    name = f"losses, {kind} {str(dtype).removeprefix('torch.')}"
    errors, problem = {}, None
    for each, loss in variants().items():
        problem = triton_problem(loss, dtype, device) if kind == "triton" else None
        if problem is None:
            # every second column of a wider tensor: no kernel may take it for contiguous
            wide = X.float().to(dtype).repeat_interleave(2, dim=1)
            x = wide.to(device)[:, ::2].requires_grad_()
            value = GlobalPairLoss(loss, kind=kind)(x, y.to(device))
            value.backward()
            assert x.grad is not None
            errors[each] = max(map(relative, (value, x.grad), expected[each]))
    if not errors:
        return Line(name, SKIPPED, str(problem))
    worst = max(errors, key=lambda each: (errors[each] != errors[each], errors[each]))
    text = f"{len(errors)} losses and gradients within {errors[worst]:.1e} of float64 ({worst})"
    return within(name, errors[worst], TOLERANCE[dtype], text, errors=errors)


def relative(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a share of the length of what is expected."""
    difference = found.detach().cpu().double() - expected
    return float(difference.norm() / expected.norm().clamp(min=1e-300))


def recall_lines(device: torch.device, sizes: Sizes) -> Iterator[Line]:
    X, y = batch(sizes.rows, sizes.dimensions, sizes.rows // 5)
    expected = recall_at_k(X.float(), y, KS)
    found = recall_at_k(X.float().to(device), y.to(device), KS)
    # one query in a thousand may have two neighbours that only rounding tells apart
    error = max(abs(found[k] - expected[k]) for k in KS)
    yield within("Recall@K", error, 1e-3, f"Recall@1 {found[1]:.2%}, on the CPU {expected[1]:.2%}")


class Network(nn.Module):
    """A convolution, so that cuDNN takes part, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 9, 16)
        ).double()

    def forward(self, images: Tensor) -> Tensor:
        return normalize(self.layers(images), dim=1)


def group_lines(place: Place) -> Iterator[Line]:
    """Some steps of all processes against the same steps of one, on the CPU with the dense loss."""
    name, sizes = f"{place.size} processes against one", place.sizes
    m = 12 * place.size
    images = torch.randn(
        m, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    labels = torch.arange(m) % (m // 4)
    loss = make_loss("multi_similarity", beta=10.0, lam=0.5)
    alone, model = Network(), Network()
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    prepared = place.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = copy.deepcopy(alone.state_dict())
    for _ in range(sizes.steps):
        value = dense_loss(loss, alone(images), labels)
        value.backward()  # type: ignore[no-untyped-call]
        single.step()
        single.zero_grad()
        wrapped, optimizer = prepared
        own = place.own(images), place.own(labels)
        done = update(place.accelerator, wrapped, GlobalPairLoss(loss), optimizer, *own)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    error = max(relative(a, b.detach()) for a, b in pairs)
    moved = max(relative(x, start[key]) for key, x in alone.state_dict().items())
    error = max(error, abs(done.loss / value.item() - 1))
    text = f"{sizes.steps} steps, weights within {error:.1e} of one process (they moved by {moved:.1e})"
    yield within(name, error, TOLERANCE[torch.float64], text, error=error, moved=moved)
