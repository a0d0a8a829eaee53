"""The losses, recall and the report of pairs on a fake GPU (tests/fakegpu.py): they equal the CPU, the
host does not wait for them, and they launch few kernels."""

import proxies
import pytest
import torch
from batches import IDS
from fleet import run


@pytest.fixture(scope="module", params=[1, 2], ids="{} processes".format)
def results(request, tmp_path_factory):
    """What each of W processes found."""
    folder = tmp_path_factory.mktemp("fakegpu")
    run("fake_gpu.py", request.param, folder)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(request.param)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fakegpu")
    run("fake_gpu.py", 1, folder, "alone")
    return torch.load(folder / "alone.pt", weights_only=False)


GROUPED = [False, True]


@pytest.mark.processes
@pytest.mark.parametrize("grouped", GROUPED, ids=["scattered", "grouped"])
@pytest.mark.parametrize("known", [False, True], ids=["gathered", "all_labels"])
def test_every_loss_equals_the_cpu(results, grouped, known):
    for found in results:
        of_losses = found[grouped, known]
        assert [*of_losses] == IDS
        for name, loss in of_losses.items():
            for cpu, gpu in zip(loss["cpu"], loss["gpu"], strict=True):
                torch.testing.assert_close(gpu, cpu, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.processes
@pytest.mark.parametrize("grouped", GROUPED, ids=["scattered", "grouped"])
def test_known_labels_give_the_bits_of_gathered_ones(results, grouped):
    for found in results:
        for name in IDS:
            for where in ("cpu", "gpu"):
                gathered, known = (found[grouped, given][name][where] for given in (False, True))
                torch.testing.assert_close(known, gathered, rtol=0, atol=0)


@pytest.mark.processes
@pytest.mark.parametrize("grouped", GROUPED, ids=["scattered", "grouped"])
def test_the_host_waits_for_no_loss(results, grouped):
    """From the second step on. Labels that are gathered are waited for once."""
    for found in results:
        for name in IDS:
            assert found[grouped, True][name]["waits"] == {}, name
            waits = found[grouped, False][name]["waits"]
            assert sum(waits.values()) == 1, (name, waits)
            assert "grouping.py" in next(iter(waits))


@pytest.mark.processes
@pytest.mark.parametrize("grouped", GROUPED, ids=["scattered", "grouped"])
def test_only_the_histogram_adds_floats_in_no_fixed_order(results, grouped):
    """torch has a reproducible scatter_add for deterministic runs."""
    for found in results:
        for name in IDS:
            loss, pairs = found[grouped, False][name]["unordered"]
            allowed = {"scatter_add"} if name.startswith("histogram") else set()
            assert {*loss, *pairs} <= allowed, name


@pytest.mark.processes
def test_the_report_of_pairs_equals_that_of_the_cpu(results):
    for found in results:
        for name in IDS:
            cpu, gpu = found[False, False][name]["reports"]
            torch.testing.assert_close(gpu, cpu, rtol=0, atol=0, msg=name)


@pytest.mark.processes
def test_a_nan_makes_the_loss_nan_and_is_found_when_asked_for(alone):
    value, message = alone["nan"]
    assert value.isnan()
    assert message.startswith(
        "1 of 48 embeddings hold NaN or infinity, or are too large (first in row 5)"
    )


@pytest.mark.processes
def test_dense_loss_recall_and_retrieval_equal_the_cpu(alone):
    torch.testing.assert_close(alone["gpu"], alone["cpu"], rtol=0, atol=0)


@pytest.mark.processes
def test_a_memory_and_two_towers_equal_the_cpu_and_the_host_does_not_wait(alone):
    """With labels that are known on the CPU, from the second use on."""
    assert [*alone["columns"]] == IDS
    for name, found in alone["columns"].items():
        for cpu, gpu in zip(found["cpu"], found["gpu"], strict=True):
            torch.testing.assert_close(gpu, cpu, rtol=1e-12, atol=1e-15, msg=name)
        assert found["waits"] == {}, name


@pytest.mark.processes
def test_losses_of_proxies_equal_the_cpu_and_the_host_does_not_wait(alone):
    assert [*alone["proxies"]] == proxies.IDS
    for name, found in alone["proxies"].items():
        for cpu, gpu in zip(found["cpu"], found["gpu"], strict=True):
            torch.testing.assert_close(gpu, cpu, rtol=1e-12, atol=1e-15, msg=name)
        assert found["waits"] == {}, name


@pytest.mark.processes
def test_a_planted_mix_of_devices_fails(alone):
    assert "mixes devices: [(12, 8)] on the CPU" in alone["mix"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("m", "W", "budget"), [(4_000, 8, 150), (4_000, 1, 150), (65_536, 8, 1_500), (65_536, 1, 1_500)]
)
def test_a_step_launches_few_kernels(alone, m, W, budget):
    for name, launches in alone["launches"][m, W].items():
        assert 30 < launches <= budget, f"{name}: {launches}"
