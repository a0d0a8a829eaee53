"""The Triton kernels of the multi-similarity loss, without a GPU: interpreted for their results,
compiled for what they would be on one. The oracle is the dense loss in float64."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from batches import batch, relative_error
from fleet import WORKERS, environment
from torch.nn.functional import normalize

from dml.errors import LaunchError
from dml.gpw import GlobalPairLoss, dense_loss, global_loss, make_loss
from dml.gpw.engine.general_kernel import GeneralKernel
from dml.gpw.engine.rows import block_statistics
from dml.gpw.engine.tiles import RowBlock
from dml.gpw.engine.triton_probe import probe
from dml.gpw.global_loss import triton_problem
from dml.gpw.grouping import Groups

KIB = 1024
PARAMETERS = {
    "lively": ({"alpha": 2.0, "beta": 10.0, "lam": 0.5}, 0.25),  # and eps
    "paper": ({"alpha": 2.0, "beta": 50.0, "lam": 1.0}, 0.1),
    "code": ({"alpha": 2.0, "beta": 40.0, "lam": 0.5}, 0.1),  # of the authors
}
SHIPPED = (64, 64, 16, 16)  # BLOCK_R, BLOCK_C, BLOCK_D, column_parts
SMALL = (16, 16, 16, 2)  # so that a small batch has several blocks, and several tiles per part


def random(sizes, d):
    """Classes of these sizes in random order, around their centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=generator)]
    centres = torch.randn(len(sizes), d, generator=generator)
    noise = torch.randn(len(labels), d, generator=generator)
    return normalize(normalize(centres)[labels] + 0.8 * normalize(noise)), labels


def identical():
    """All the same vector, with S = 4: exponents of 150, where e^89 is infinite in float32."""
    _, labels = random([5, 3, 1], d=6)
    return torch.tensor([[2.0, 0, 0, 0, 0, 0]]).repeat(9, 1), labels


def opposite():
    """Two classes at the two ends of a line, almost: the exponents of negatives underflow."""
    X, labels = random([4, 4], d=5)
    end = torch.tensor([1.0, 0, 0, 0, 0])
    return normalize(torch.where(labels[:, None] == 0, end, -end) + 1e-3 * X), labels


def torn():
    """The same with alternating labels: positives near -1 or 1, and negatives near 1 or -1."""
    X, _ = opposite()
    return X, torch.arange(8) % 2


def ties():
    """S in steps of 1/4, as is the eps of one loss: some pairs are exactly at the mining threshold."""
    _, labels = random([5, 4, 4], d=4)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-1, 2, (13, 4), generator=generator) / 2, labels


BATCHES = {
    "m = 37, d = 19": (lambda: random([9, 1, 7, 5, 2, 13], d=19), 1, 16, SHIPPED),
    "several blocks": (lambda: random([26, 1, 30, 2, 3, 9], d=35), 1, 50, SHIPPED),
    "several tiles per part": (lambda: batch(m=50, d=19, dtype=torch.float32), 1, 40, SMALL),
    "two processes": (lambda: random([9, 1, 7, 5, 2, 14], d=19), 2, 16, SMALL),
    "three processes": (lambda: random([9, 1, 7, 5, 2, 15], d=19), 3, 7, SMALL),
    "one class": (lambda: random([37], d=19), 1, 64, SMALL),
    "no positives": (lambda: random([1] * 11, d=19), 1, 64, SMALL),
    "one sample": (lambda: random([1], d=3), 1, 64, SMALL),
    "identical": (identical, 1, 64, SMALL),
    "opposite": (opposite, 1, 64, SMALL),
    "torn": (torn, 2, 64, SMALL),
    "ties": (ties, 1, 64, SMALL),
}
LOSSES = {name: make_loss("ms_weighting", **p) for name, (p, _) in PARAMETERS.items()} | {
    f"{name}, mined": make_loss("multi_similarity", **p, eps=eps)
    for name, (p, eps) in PARAMETERS.items()
}
# a batch, a loss, and where S is; the interpreter takes seconds for a batch if S is kept
KEPT_LOSSES = ["lively", "lively, mined", "code, mined"]
CASES = [(b, name, "on chip") for b in BATCHES for name in LOSSES]
CASES += [(b, name, "kept") for b in BATCHES for name in KEPT_LOSSES]


def run(worker, *arguments, **variables):
    command = [sys.executable, WORKERS / worker, *arguments]
    env = environment(**variables)
    ended = subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr


ON_CHIP = ["hardest_positive", "negatives", "positives", "weights"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Statistics and gradient of every case, by the interpreted kernels."""
    folder = tmp_path_factory.mktemp("triton")
    cases = []
    for b, name, where in CASES:
        make, *how = BATCHES[b]
        cases.append((where == "kept", LOSSES[name], *make(), *how))
    torch.save(cases, folder / "cases.pt")
    run("triton_sweeps.py", folder / "cases.pt", folder / "found.pt", TRITON_INTERPRET="1")
    cases, views, probed = torch.load(folder / "found.pt")
    return {**dict(zip(CASES, cases, strict=True)), "views": views, "probed": probed}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_kernels_equal_dense_in_float64(found, case):
    (make, *_), loss = BATCHES[case[0]], LOSSES[case[1]]
    t, gradient = found[case]
    X, labels = make()
    X = X.double().requires_grad_()
    expected = dense_loss(loss, X, labels)
    (expected_gradient,) = torch.autograd.grad(expected, X)
    value = loss.sum_of_anchors(t) / len(X)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-30)
    assert gradient.dtype == torch.float32
    assert relative_error(gradient.double(), expected_gradient) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_statistics_are_those_of_the_general_kernel(found, case):
    (make, *_), loss = BATCHES[case[0]], LOSSES[case[1]]
    t, _ = found[case]
    X, labels = make()
    groups = Groups.of(labels)
    S = (X @ X.T)[groups.order][:, groups.order]
    block = RowBlock(
        S,
        torch.arange(len(X)),
        groups,
        erase_positives=False,
        on_host=torch.arange(len(X)),
        where=slice(None),
    )
    expected = block_statistics(loss, GeneralKernel(loss), block, tile=16)
    assert list(t) == list(expected)
    for name, x in expected.items():
        assert t[name].dtype == x.dtype
        torch.testing.assert_close(t[name], x, rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(t["P"], expected["P"])


@pytest.mark.slow
def test_embeddings_in_any_layout_give_the_same_bits(found):
    views = found["views"]
    for name, of_kinds in views.items():
        torch.testing.assert_close(of_kinds, views["contiguous"], rtol=0, atol=0, msg=name)


@pytest.mark.slow
def test_a_kernel_that_works_is_no_problem(found):
    assert found["probed"] is None


def test_without_a_gpu_a_kernel_is_a_problem():
    assert probe(torch.device("cpu")).startswith("Triton cannot run a kernel: ")


def test_where_triton_fails_auto_streams_and_says_so_once(monkeypatch):
    """Oracle: the loss that streams. The GPU is this CPU, on which no kernel runs."""
    monkeypatch.setattr(global_loss, "triton_problem", lambda *where: None)
    ms, (X, labels) = make_loss("multi_similarity"), batch(dtype=torch.float32)
    auto = GlobalPairLoss(ms)
    with pytest.warns(
        UserWarning, match="without Triton .on process 0, Triton cannot run a kernel"
    ):
        value = auto(X, labels)
    assert torch.equal(value, GlobalPairLoss(ms, kind="streaming")(X, labels))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(X, labels)
    with pytest.raises(LaunchError, match=r"Triton cannot run a kernel.*; set engine.kind=auto"):
        GlobalPairLoss(ms, kind="triton")(X, labels)


def test_triton_says_why_it_cannot_compute_a_loss():
    ms, gpu, cpu = make_loss("multi_similarity"), torch.device("cuda"), torch.device("cpu")
    assert all(triton_problem(loss, torch.float32, gpu) is None for loss in LOSSES.values())
    for loss, dtype, device, reason in (
        (make_loss("contrastive"), torch.float32, gpu, "not contrastive"),
        (ms, torch.float64, gpu, "in float32, not torch.float64"),
        (ms, torch.float32, cpu, "needs a CUDA GPU, and this process computes on cpu"),
    ):
        assert reason in triton_problem(loss, dtype, device)
    X, labels = batch(dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        GlobalPairLoss(ms, kind="triton")(X, labels)
    with pytest.raises(ValueError, match="kind must be one of auto, streaming, triton"):
        GlobalPairLoss(ms, kind="cuda")


CAPABILITIES = ["80", "90", "100"]  # A100, H100, B200


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Capability -> what the compiler made of the kernels. What it has made of the same source before it
    finds in a folder beside the packages: Triton's key is the source, the options and its own version."""
    out = tmp_path_factory.mktemp("compiled") / "found.json"
    cache = Path(sys.prefix) / "triton"
    run("triton_compile.py", out, *CAPABILITIES, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_gpus(compiled, capability):
    kernels = compiled[capability]
    assert list(kernels) == [*ON_CHIP, "row_statistics", "weights_in_place"]
    for name, kernel in kernels.items():
        assert kernel["cubin"] > 0
        assert kernel["stack"] <= 8 * (capability == "100"), f"{name} spills registers"
        assert kernel["shared"] <= 99 * KIB
        assert ".tf32" not in kernel["ptx"]
        assert "fma.rn.f32" in kernel["ptx"]
        if name in ON_CHIP:  # for sm_100: in the blocks of 64 dimensions that the tuner tries
            assert kernel["multiply_adds"] >= 0.85, f"{name}: {kernel['multiply_adds']:.1%}"
