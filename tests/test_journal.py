"""Oracle: TensorBoard's own reader, and the lines that were written."""

import errno
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from dml.gpw.monitor import Histogram, PairReport
from dml.run_folder.clock import Clock
from dml.run_folder.journal import METRICS, TIMING, Journal

METRIC = {name: 0.5 for name in METRICS}
TIME = {name: 2.0 for name in TIMING}
RED = Image.new("RGB", (20, 10), (255, 0, 0))


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0})
    return found.Reload()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tensorboard_finds_what_was_written(tmp_path):
    counts = torch.zeros(64, dtype=torch.float64)
    counts[32] = 7
    h = Histogram(-1.0, 1.0, counts)
    journal = Journal(tmp_path)
    journal.training(10, METRIC, TIME)
    journal.pairs(10, PairReport(1.0, 1.0, 1.0, h, h, h))
    journal.evaluation(10, "test", {"recall@1": 0.25, "map@r": 0.125}, RED)
    journal.hparams(
        {"loss": {"beta": 50.0, "mine": True}, "eval": {"ks": [1, 2]}}, {"recall@1": 0.3}
    )
    journal.projector(torch.eye(3), ["a", "b", "c"], torch.zeros(3, 8, 8, 3, dtype=torch.uint8))
    journal.close()
    found = events(tmp_path)
    for tag in (*METRICS.values(), *TIMING.values(), "test/recall@1"):
        assert len(found.Scalars(tag)) == 1
    assert found.Scalars("test/map@r")[0].value == 0.125
    histogram = found.Histograms("pairs/positive_similarities")[0].histogram_value
    assert (histogram.num, histogram.min) == (7, pytest.approx(1 / 64))
    image = found.Images("test/nearest")[0]
    assert (image.width, image.height) == (20, 10)
    assert found.SummaryMetadata("_hparams_/experiment") is not None
    assert (tmp_path / "projector_config.pbtxt").exists()


def test_a_resumed_journal_takes_back_what_came_after_the_checkpoint(tmp_path):
    journal = Journal(tmp_path)
    journal.training(10, METRIC, TIME)
    size = journal.size()
    journal.training(20, METRIC, TIME)
    journal.evaluation(20, "test", {"recall@1": 0.25}, RED)
    journal.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    again = Journal(tmp_path, step=10, size=size)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [10]
    again.training(20, METRIC, TIME)
    again.evaluation(20, "test", {"recall@1": 0.25}, RED)
    again.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [line["step"] for line in lines(tmp_path / "timing.jsonl")] == [10, 20, 20]
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == [10, 20]


def test_a_run_that_begins_again_without_a_checkpoint_begins_anew(tmp_path):
    journal = Journal(tmp_path)
    journal.training(10, METRIC, TIME)
    journal.close()
    again = Journal(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    again.training(10, METRIC, TIME)
    again.close()
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == [10]


def test_lines_that_were_lost_are_noticed(tmp_path):
    journal = Journal(tmp_path, step=10, size=100)
    assert journal.metrics.lost == 100
    journal.close()


def full(line):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_is_a_problem_to_be_told(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(journal.metrics, "write", full)
        journal.training(10, METRIC, TIME)
    journal.close()
    assert "cannot be written: No space left on device; make room" in str(journal.problem)


def test_numbers_survive_the_file(tmp_path):
    journal = Journal(tmp_path)
    journal.training(10, {"loss": 1 / 3, "gradient_norm": None}, {})
    journal.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 1 / 3, "gradient_norm": None}]


def test_the_clock_tells_seconds_a_step_and_starts_again():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock("data"):
            np.linalg.svd(np.eye(50))
        with clock("forward"):
            pass
        clock.steps += 1
    total = sum(clock.seconds.values())
    timing = clock.timing(batch_size=30, bytes_sent=100)
    assert timing["images_per_second"] == pytest.approx(60 / total)
    assert timing["seconds_data"] + timing["seconds_forward"] == pytest.approx(total / 2)
    assert timing["bytes_sent"] == 50
    assert timing["memory_bytes"] > 10_000_000
    with clock("data"):
        pass
    clock.steps += 1
    assert clock.timing(30, bytes_sent=130)["bytes_sent"] == 30
