"""Block sizes of the Triton kernels: measured once, kept on disk. Here clocks are canned."""

import pytest
import torch
import triton

from dml.gpw.engine import triton_kept, triton_ms, triton_tuning
from dml.gpw.engine.triton_tuning import described, fastest, quickest, remembered


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton_tuning, "found", {})
    return tmp_path


def test_the_least_time_wins_and_what_does_not_fit_never_does():
    assert quickest([3.0, float("inf"), 2.0, 2.5]) == 2


def test_a_choice_is_measured_once_and_kept_on_disk(cache):
    measured = []

    def choose():
        measured.append(1)
        return 2

    assert remembered("one GPU", choose) == 2
    assert remembered("one GPU", choose) == 2
    assert len(measured) == 1
    assert remembered("another GPU", choose) == 2
    assert len(measured) == 2
    assert len([*cache.rglob("dml_blocks.json")]) == 2


def test_batches_of_about_the_same_size_share_a_choice():
    choices = triton_ms.CHOICES
    key = described(choices, "streaming", (500, 4000, 512), "A100")
    assert key == described(choices, "streaming", (512, 4096, 512), "A100")
    others = [
        described(choices, "kept", (500, 4000, 512), "A100"),
        described(choices, "streaming", (513, 4000, 512), "A100"),
        described(choices, "streaming", (500, 4000, 512), "H100"),
        described(choices[:2], "streaming", (500, 4000, 512), "A100"),
    ]
    assert len({key, *others}) == 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_deterministic_run_takes_the_first_choice(cache, device):
    """Also the interpreter, without a GPU. `run` would fail."""
    torch.use_deterministic_algorithms(device == "cuda")
    try:
        where = torch.device(device)
        assert fastest(triton_kept.CHOICES, "kept", (4, 4, 4), where, None) == triton_kept.Block()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gpu_takes_the_choice_with_the_least_time(cache, monkeypatch):
    times = {512: 1.0, 1024: 2.0, 2048: 3.0, 4096: 4.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(triton_tuning, "seconds", lambda run, choice: times[choice.BLOCK])
    shape, gpu = (4, 4, 4), torch.device("cuda")
    assert fastest(triton_kept.CHOICES, "kept", shape, gpu, None) == triton_kept.Block(512)
