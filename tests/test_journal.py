"""Oracle: TensorBoard's own reader, and the lines that were written."""

import errno
import json
import os
import re

import numpy as np
import pytest
import torch
from fleet import ROOT
from PIL import Image

from dml.errors import ConfigError, RunError
from dml.gpw.monitor import Histogram, PairReport
from dml.run_folder.clock import Clock
from dml.run_folder.events import End, Evaluation, Pairs, Training
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress
from dml.run_folder.tensorboard_log import NAMES, score_name

METRIC = {name: 0.5 for name, tag in NAMES.items() if not tag.startswith("speed/")}
TIME = {name: 2.0 for name, tag in NAMES.items() if tag.startswith("speed/")}
RED = Image.new("RGB", (20, 10), (255, 0, 0))


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0})
    return found.Reload()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Alone:
    """As much of a team as a journal needs."""

    first = True

    def __init__(self):
        self.said, self.problems = [], []
        self.say, self.note = self.said.append, self.problems.append


def opened(folder, step=0, size=0, team=None):
    folder.mkdir(exist_ok=True)
    return Journal.open(team or Alone(), folder, Progress(step=step, metrics_size=size))


def test_tensorboard_finds_what_was_written(tmp_path):
    counts = torch.zeros(64, dtype=torch.float64)
    counts[32] = 7
    h = Histogram(-1.0, 1.0, counts)
    journal = opened(tmp_path)
    journal.log(Training(10, METRIC, TIME))
    journal.log(Pairs(10, PairReport(1.0, 1.0, 1.0, h, h, h)))
    journal.log(Evaluation(10, "test", {"recall@1": 0.25, "map@r": 0.125}, RED))
    settings = {"loss.beta": 50.0, "loss.mine": True, "eval.ks": [1, 2]}
    pictures = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    journal.log(End(settings, torch.eye(3), ["a", "b", "c"], pictures))
    journal.close()
    found = events(tmp_path)
    for tag in (*NAMES.values(), "main/test_recall@1"):
        assert len(found.Scalars(tag)) == 1
    assert found.Scalars("test/map@r")[0].value == 0.125
    histogram = found.Histograms("pairs/positive_similarities")[0].histogram_value
    assert (histogram.num, histogram.min) == (7, pytest.approx(1 / 64))
    image = found.Images("test/nearest")[0]
    assert (image.width, image.height) == (20, 10)
    assert found.SummaryMetadata("_hparams_/session_start_info") is not None
    assert (tmp_path / "projector_config.pbtxt").exists()


def test_loss_and_recall_come_first():
    """TensorBoard sorts by name."""
    tags = sorted([*NAMES.values(), score_name("test", "recall@1"), score_name("test", "map@r")])
    assert tags[:2] == ["main/loss", "main/test_recall@1"]
    assert score_name("validation", "recall@1") == "main/validation_recall@1"


def test_the_table_of_runs_shows_what_differs(tmp_path):
    """Oracle: TensorBoard's own plugin, which ticks the settings that differ, five at most."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams.backend_context import Context

    pictures = torch.zeros(3, 8, 8, 3, dtype=torch.uint8)
    for name, beta in (("a", 40.0), ("b", 50.0)):
        journal = opened(tmp_path / name)
        journal.log(Training(10, METRIC, TIME))
        settings = {"batch.classes": 16, "loss.beta": beta, "loss.name": "multi_similarity"}
        journal.log(End(settings, torch.eye(3), ["a", "b", "c"], pictures))
        journal.close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    plugin = Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(tmp_path))))
    asked = RequestContext()
    found = plugin.experiment_from_metadata(
        asked,
        "",
        True,
        plugin.hparams_metadata(asked, ""),
        plugin.hparams_from_data_provider(asked, "", None),
    )
    differs = {info.name: info.differs for info in found.hparam_infos}
    assert differs == {"batch.classes": False, "loss.beta": True, "loss.name": False}
    assert "main/loss" in {info.name.tag for info in found.metric_infos}


def test_a_resumed_journal_takes_back_what_came_after_the_checkpoint(tmp_path):
    journal = opened(tmp_path)
    journal.log(Training(10, METRIC, TIME))
    size = journal.length()
    journal.log(Training(20, METRIC, TIME))
    journal.log(Evaluation(20, "test", {"recall@1": 0.25}, RED))
    journal.close()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    again = opened(tmp_path, step=10, size=size)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [10]
    again.log(Training(20, METRIC, TIME))
    again.log(Evaluation(20, "test", {"recall@1": 0.25}, RED))
    again.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [line["step"] for line in lines(tmp_path / "timing.jsonl")] == [10, 20, 20]
    assert [event.step for event in events(tmp_path).Scalars("main/loss")] == [10, 20]


def test_a_run_that_begins_again_without_a_checkpoint_begins_anew(tmp_path):
    journal = opened(tmp_path)
    journal.log(Training(10, METRIC, TIME))
    journal.close()
    again = opened(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    again.log(Training(10, METRIC, TIME))
    again.close()
    assert [event.step for event in events(tmp_path).Scalars("main/loss")] == [10]


def test_lost_lines_are_reported(tmp_path):
    team = Alone()
    opened(tmp_path, step=10, size=100, team=team).close()
    assert team.said == ["metrics.jsonl is shorter than at the checkpoint: lines of it are lost"]


def full(line):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_a_problem_for_the_team(tmp_path, monkeypatch):
    team = Alone()
    journal = opened(tmp_path, team=team)
    with monkeypatch.context() as patch:
        patch.setattr(journal.lines.metrics, "write", full)
        journal.log(Training(10, METRIC, TIME))
    journal.close()
    assert "cannot be written: No space left on device; make room" in str(team.problems[0])


def test_metrics_that_cannot_be_synced_are_a_problem(tmp_path, monkeypatch):
    """A checkpoint may not know of metrics that are not on disk."""
    journal = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="cannot be written: No space left on device"):
            journal.sync()
    journal.close()


def test_on_another_rank_a_journal_is_silent(tmp_path):
    team = Alone()
    team.first = False
    journal = opened(tmp_path, team=team)
    journal.log(Training(10, METRIC, TIME))
    journal.log(Evaluation(10, "test", {"recall@1": 0.25}, RED))
    assert journal.length() == 0
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_numbers_survive_the_file(tmp_path):
    journal = opened(tmp_path)
    journal.log(Training(10, {"loss": 1 / 3, "gradient_norm": None}, {}))
    journal.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 1 / 3, "gradient_norm": None}]


def test_the_clock_gives_seconds_per_step_and_starts_again():
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


# ---- trackers -------------------------------------------------------------------------------------


def config_with(trackers):
    from dml.config import load

    sets = ["data.dataset=icons", "data.shards=x", f"run.trackers={trackers}"]
    return load(ROOT / "configs" / "icons_mini.yaml", sets)


@pytest.fixture
def trackers(monkeypatch):
    """Two trackers, registered with accelerate as wandb and aim: their services are not here."""
    from accelerate import tracking

    made = {}

    def kind(title, fails):
        class Recording(tracking.GeneralTracker):
            name, requires_logging_directory, tracker = title, False, None

            def __init__(self, project, **options):
                super().__init__()
                self.calls = [("made", project, options)]
                made[title] = self.calls

            def start(self):
                self.calls.append(("start",))

            def store_init_configuration(self, values):
                self.calls.append(("settings", values))

            def log(self, values, step=None, **options):
                if fails:
                    raise ConnectionError("no network")
                self.calls.append((step, values))

            def finish(self):
                self.calls.append(("finish",))

        return Recording

    for title, fails in (("wandb", False), ("aim", True)):
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, title, kind(title, fails))
    monkeypatch.setattr(tracking, "_available_trackers", ["tensorboard", "wandb", "aim"])
    return made


def test_trackers_get_the_scalars_of_tensorboard(tmp_path, trackers):
    team = Alone()
    journal = Journal.open(team, tmp_path, Progress(), config_with("wandb, aim"))
    journal.log(Training(10, {**METRIC, "loss": None}, TIME))
    journal.log(Evaluation(10, "test", {"recall@1": 0.25}, RED))
    journal.close()
    made, start, (_, settings), training, evaluation, finish = trackers["wandb"]
    assert made == ("made", "dml", {"name": tmp_path.name, "dir": str(tmp_path)})
    assert (start, finish) == (("start",), ("finish",))
    assert settings["loss.beta"] == 50
    assert "data.shards" not in settings
    names = set(NAMES.values()) - {"main/loss"}
    assert (training[0], set(training[1])) == (10, names)
    assert evaluation == (10, {"main/test_recall_at_1": 0.25})
    for name in (*training[1], *evaluation[1]):
        assert re.fullmatch(r"[/\w.\- :]+", name), f"mlflow refuses {name}"
    # the other has no network: one warning, and the run goes on
    assert trackers["aim"][-1][0] == "settings"
    assert [line for line in team.said if "warning: aim gets nothing more" in line] == team.said
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_a_tracker_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    from accelerate import tracking

    monkeypatch.setattr(tracking, "_available_trackers", ["tensorboard"])
    with pytest.raises(RunError, match=r"run.trackers names swanlab, which cannot be imported"):
        Journal.open(Alone(), tmp_path, Progress(), config_with("swanlab"))


@pytest.mark.parametrize("wrong", ["nobody", "wandb wandb", "'wandb,wandb'", "''"])
def test_a_tracker_has_a_known_name(wrong):
    with pytest.raises(ConfigError, match=r"run\.trackers"):
        config_with(wrong)


def test_no_tracker_is_the_default(tmp_path, trackers):
    assert config_with("null").run.trackers is None
    Journal.open(Alone(), tmp_path, Progress(), config_with("null")).close()
    assert trackers == {}
