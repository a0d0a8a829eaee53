"""In bf16 the weights that are saved are the fp32 masters to the bit, under every ZeRO stage.

Oracles: DeepSpeed's own way to read the masters, and the weights of DDP, which reduces in fp32.
"""

import pytest
import torch
from fleet import run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # the first launch compiles

ZERO = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masters")
    run("masters.py", 2, folder)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def same(found, expected):
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("how", ZERO)
def test_saved_weights_are_the_masters(weights, how):
    found = weights[how]
    assert found["masters"]
    assert all(x.dtype == torch.float32 for x in found["evaluated"].values())
    assert same(found["trained"], found["masters"]) == []
    assert same(found["evaluated"], found["masters"]) == []
    assert any(not torch.equal(x, x.bfloat16().float()) for x in found["masters"].values())


@pytest.mark.parametrize("how", ["ddp", *ZERO])
def test_weights_and_slots_of_the_first_process_reach_all(weights, how):
    found = weights[how]
    assert same(found["read back"], found["put in"]) == []
    if how != "zero3":
        assert same(weights[f"{how}-1"], found["put in"]) == []
    assert any(x.abs().max() > 0 for x in found["slots"].values())
    assert same(found["slots again"], found["slots"]) == []


@pytest.mark.parametrize("how", ZERO)
def test_gradients_are_reduced_as_under_ddp(weights, how):
    assert same(weights[how]["trained"], weights["ddp"]["trained"]) == []
