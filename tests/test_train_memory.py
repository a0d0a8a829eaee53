"""Runs with a cross-batch memory: on any number of processes, interrupted, under ZeRO. Oracle: the same run
on one process, or undisturbed."""

import json
import signal

import pytest
from runs import (
    BASE,
    ON_CPU,
    TRAIN,
    Launched,
    checkpoints,
    content,
    lines,
    losses,
    run,
    scalars,
    train_several,
)
from safetensors.torch import load_file

from dml.config import load
from dml.plan import plan
from launch.zero import deepspeed_variables

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

# Classes are dealt in turn, 100 of 500 at a time: from step 6 on they come again.
BATCH = ["batch.classes=100", "batch.per_class=2"]
MEMORY = [*BATCH, "memory.size=1100", "memory.from_step=2", "memory.weight=0.5", "length.steps=10"]


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    runs = {
        1: {"one": MEMORY, "without": [*BATCH, "length.steps=10"]},
        2: {"two": MEMORY, "parts": [*MEMORY, "engine.micro_batch=17"]},
        4: {"four": MEMORY},
    }
    for processes, named in runs.items():
        for name, ended in train_several(processes, folder, named).items():
            assert [code for code, _ in ended] == [0] * processes, (name, ended)
    return folder


@pytest.mark.parametrize("name", ["two", "parts", "four"])
def test_any_number_of_processes_and_micro_batches(curves, name):
    assert losses(curves / name) == pytest.approx(losses(curves / "one"), rel=1e-4)
    one, other = (
        load_file(checkpoints(curves / n)[-1] / "memory.safetensors") for n in ("one", name)
    )
    for key in ("labels", "identities", "place"):
        assert one[key].tolist() == other[key].tolist()
    assert (one["embeddings"] - other["embeddings"]).abs().max() < 1e-3


def test_the_memory_begins_where_it_says(curves):
    """The steps before are those without a memory. Step 3 fills it; step 4 uses it, without a positive."""
    found, without = losses(curves / "one"), losses(curves / "without")
    assert found[:5] == without[:5]
    assert all(a > b for a, b in zip(found[5:], without[5:], strict=True))
    shares = [line["anchors_with_memory"] for line in lines(curves / "one") if "loss" in line]
    assert shares[:5] == [None, None, None, 0, 0]
    assert all(0.3 < share <= 1 for share in shares[5:])
    assert "pairs/anchors_with_memory" in scalars(curves / "one")
    assert "anchors_with_memory" not in lines(curves / "without")[0]
    assert not (checkpoints(curves / "without")[-1] / "memory.safetensors").exists()


def test_the_plan_says_what_it_costs_and_the_wire_agrees(curves):
    """What the loss sends is counted by the run itself."""
    for name in ("one", "two", "four"):
        planned = json.loads((curves / name / "plan.json").read_text())
        assert planned["memory"]["size"] == 1100
        timing = (curves / name / "timing.jsonl").read_text().splitlines()
        sent = [json.loads(line)["bytes_sent"] for line in timing]
        labels = 8 * planned["images_per_process"] * (planned["processes"] - 1)  # not sent: known
        assert set(sent) <= {planned["loss_bytes_sent"] - labels}


def test_killed_and_resumed_to_the_bit(tmp_path):
    sets = [*MEMORY[:-1], "length.steps=12", "save.every_minutes=1e-9"]
    straight = Launched(2, tmp_path / "straight", *sets)
    assert set(straight.end()) == {0}, straight.said
    killed = Launched(2, tmp_path / "killed", *sets).until(9)
    killed.rank(0).send_signal(signal.SIGKILL)
    killed.end()
    resumed = Launched(2, tmp_path / "killed", *sets)
    assert set(resumed.end()) == {0}, resumed.said
    assert "resuming after step" in resumed.said
    assert content(resumed.run) == content(straight.run)
    a, b = (checkpoints(r.run)[-1] / "memory.safetensors" for r in (straight, resumed))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_under_zero_it_is_the_same_run(curves, tmp_path, stage):
    """The memory is outside of the model, so the stages need not know of it. Oracle: two processes of DDP."""
    variables = {**deepspeed_variables(stage), **ON_CPU}
    run(TRAIN, 2, *BASE, f"run.dir={tmp_path}", *MEMORY, variables=variables, timeout=500)
    assert losses(tmp_path / "icons_mini") == pytest.approx(losses(curves / "two"), rel=1e-4)


@pytest.mark.parametrize(("loss", "sums"), [("histogram", 2 * 151), ("margin", 4), ("triplet", 0)])
def test_the_plan_counts_the_sums_that_a_memory_sends(loss, sums):
    """tests/test_columns_processes.py counts them on the wire."""
    sets = [*BASE[3:], *MEMORY, f"loss.name={loss}"]
    planned = plan(load(BASE[1], sets), processes=4)
    assert planned.memory.bytes_sent == 3 * 8 * sums
    assert (" sent" in str(planned.memory)) == (sums > 0)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            ["memory.size=20"],
            "must hold the embeddings of at least one batch, which has 200 images",
        ),
        (["memory.size=200"], "the memory would never be used: the run has 30 steps"),
        (["memory.size=200", "loss.name=arcface"], "arcface compares images with proxies"),
        (["memory.from_step=3"], "has no effect without memory.size"),
        (["memory.size=1000000000", "model.embedding_size=100000"], "of memory per process"),
    ],
)
def test_what_cannot_be_is_refused_at_planning(sets, sentence):
    config, *given = BASE[1], *BASE[3:]
    with pytest.raises(ValueError, match=sentence):
        plan(load(config, [*given, *BATCH, *sets]))
