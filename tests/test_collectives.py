"""What is sent, and how all processes end when one of them has a problem."""

import time

import pytest
import torch
from fleet import ROOT, run, start

from dml.config import load
from dml.distributed.collectives import Wire
from dml.gpw import LOSSES
from dml.plan import plan


def test_alone_nothing_is_sent():
    wire = Wire()
    x, y = torch.randn(3, 2), torch.arange(3)
    gathered = wire.gather(x, y)
    assert torch.equal(gathered[0], x[None])
    assert torch.equal(gathered[1], y[None])
    assert gathered[0].data_ptr() == x.data_ptr()
    assert (wire.size, wire.rank, wire.bytes_sent, wire.collectives) == (1, 0, 0, 0)


@pytest.mark.processes
@pytest.mark.parametrize("processes", [2, 3])
def test_a_step_sends_one_gather_of_embeddings_and_one_of_row_statistics(processes, tmp_path):
    """Oracle: a count of what torch.distributed was asked to do."""
    run("wire.py", processes, tmp_path)
    b, d = 50, 512
    for rank in range(processes):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name in LOSSES:
            step = found[name, 1]
            assert [call for call, _ in step["forward"]] == ["all_gather_single"] * 2, name
            assert step["backward"] == [], name
            (_, embeddings), (_, statistics) = step["forward"]
            assert embeddings == b * (4 * d + 8)
            assert statistics < embeddings / 10
            assert step["counted"] == (processes - 1) * (embeddings + statistics)
        strided, transposed = found["strided"]
        assert strided.tolist() == [[r, 2 + r, 4 + r] for r in range(processes)]
        assert transposed.shape == (processes, 3, 2)
        assert found["everyone"] == [None, "no compiler", None][:processes]
        # MS: four scalars per row and, once per process, its share of the loss
        (_, embeddings), (_, statistics) = found["multi_similarity", 1]["forward"]
        assert statistics == b * 16 + 8
        assert embeddings + statistics <= 1.02 * (b * 4 * d + b * 16)
        # which is what the plan says
        sets = [f"batch.classes={processes * b // 5}", "batch.per_class=5"]
        planned = plan(load([ROOT / "configs" / "sop_bs1000.yaml"], sets), processes)
        assert found["multi_similarity", 1]["counted"] == planned.loss_bytes_sent
        # the first step also asks whether all brought the same
        first = [call for call, _ in found["multi_similarity", 0]["forward"]]
        assert first.count("all_gather_object") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "sentence", "processes"),
    [
        ("fewer rows", "every process must give the same shapes and types (process 0: (30, 8)", 2),
        ("no rows", "process 1: the batch is empty (m = 0)", 2),
        ("label type", "torch.float64 with (30,) torch.int32", 2),
        ("float labels", "process 1: labels must be integers", 2),
        (
            "nan",
            "1 of 60 embeddings hold NaN or infinity, or are too large (first in row 3 of process 1)",
            3,
        ),
    ],
)
def test_a_mishap_on_one_process_is_the_same_sentence_on_all(kind, sentence, processes):
    begin = time.monotonic()
    ended = start("mishap.py", processes, kind, timeout=60)
    assert time.monotonic() - begin < 45  # most of it imports; a hang would last ten minutes
    for process in ended:
        assert process.returncode != 0
        assert sentence in process.stderr
        assert "trained" not in process.stdout


@pytest.mark.processes
def test_rows_that_change_later_end_all_processes():
    """The process that changed fails before it sends; the other one loses its peer."""
    ended = start("mishap.py", 2, "fewer rows later", timeout=60)
    assert all(process.returncode != 0 for process in ended)
    assert "process 1 gave (29, 8)" in ended[1].stderr
    assert "in the first step (30, 8)" in ended[1].stderr


@pytest.mark.processes
def test_the_worker_of_these_tests_trains_when_nothing_goes_wrong():
    for process in run("mishap.py", 2, "nothing"):
        assert "trained" in process.stdout
