"""A checkpoint is written beside the training: it holds the step at which it was begun, and what goes
wrong is raised at the next meeting."""

import errno
import os
import threading

import pytest
import torch
from accelerate import Accelerator

from dml.distributed.full_state import write_weights
from dml.distributed.signals import Interrupt
from dml.distributed.team import Team
from dml.errors import CheckpointError, NotFiniteError, RunError
from dml.run_folder import checkpoint
from dml.run_folder.checkpoint import read, read_last
from dml.run_folder.events import Training
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress
from dml.run_folder.saver import MODEL, OPTIMIZER, Origin, Saver, last_checkpoint


class Run:
    """A model that trains, and its saver."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.team, self.progress = Team(Accelerator(cpu=True), Interrupt()), Progress()
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.Adam(model.parameters())
        self.model, self.optimizer = self.team.accelerator.prepare(model, optimizer)
        self.journal = Journal.open(self.team, folder, self.progress)
        origin = Origin("settings", "shards")
        given = (origin, self.model, self.optimizer, self.progress, self.journal)
        self.saver, self.root = Saver(self.team, folder, *given), folder / "checkpoints"

    def step(self):
        self.model(torch.randn(3, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.count(1.0, 0.0)
        self.journal.log(Training(self.progress.step, {"loss": 1.0}, {}))

    def weights(self):
        return {name: x.clone() for name, x in self.model.state_dict().items()}


@pytest.fixture
def run(tmp_path, fresh_accelerate):
    run = Run(tmp_path)
    run.step()
    yield run
    run.saver.close()
    run.journal.close()


@pytest.fixture
def held(monkeypatch):
    """Holds back every write of a checkpoint until it is set."""
    may, write = threading.Event(), checkpoint.write_synced

    def waiting(path, data):
        assert may.wait(60)
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", waiting)
    yield may
    may.set()


def test_training_goes_on_while_a_checkpoint_is_written(run, held):
    before, size = run.weights(), run.journal.length()
    moment = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    run.saver.save()
    for _ in range(3):
        assert not run.team.meet()
        run.step()
    assert read_last(run.root) == (None, [])
    assert not torch.equal(run.model.weight, before["weight"])
    held.set()
    assert run.saver.step == 1
    last, _ = read_last(run.root)
    assert last.state["progress"] == {**vars(Progress(step=1)), "metrics_size": size}
    assert all(torch.equal(last.tensors[MODEL][name], x) for name, x in before.items())
    assert torch.equal(last.tensors[OPTIMIZER]["weight/exp_avg"], moment)


def test_the_next_one_waits_for_the_one_before(run, held):
    run.saver.save()
    run.step()
    threading.Timer(0.2, held.set).start()
    run.saver.save()
    assert (run.root / "step-00000001").exists()
    assert run.saver.step == 2
    run.saver.background.start = None
    run.saver.save()  # of the same step: it is only waited for
    assert (run.root / "step-00000002").exists()


def test_no_thread_starts_while_it_is_saved(run, held, monkeypatch):
    """torch raises from the handler of a signal when a loader's worker is killed: in the middle of the start of a
    thread, the one that saves could not be waited for."""

    def killed(thread):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    monkeypatch.setattr(threading.Thread, "start", killed)
    held.set()
    run.saver.save()
    run.saver.close()
    assert run.saver.step == 1


def test_the_best_weights_are_those_of_their_step(run, held):
    before = run.weights()
    run.progress.best_step = 1
    run.saver.save_best()
    run.step()
    held.set()
    best = run.saver.best()
    write_weights(run.team.accelerator, run.model, best)
    assert all(torch.equal(x, before[name]) for name, x in run.weights().items())
    assert read(run.root / "best-00000001").state["step"] == 1


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("later", ["meet", "save", "settle"])
def test_a_full_disk_is_raised_at_the_next_meeting(run, later, monkeypatch):
    run.saver.save()
    assert run.saver.step == 1
    run.step()
    monkeypatch.setattr(checkpoint, "write_synced", full)
    run.saver.save()
    assert run.saver.step == 1, "the one before is the last"
    kept = "No space left on device; the one before is kept, and the same command resumes from it"
    with pytest.raises(CheckpointError, match=kept):
        {"meet": run.team.meet, "save": run.saver.save, "settle": run.saver.settle}[later]()


def test_metrics_that_do_not_reach_the_disk_spoil_the_checkpoint(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run.saver.save()
        run.saver.close()
    assert read_last(run.root) == (None, [])
    with pytest.raises(RunError, match=r"the journal in .* cannot be written: No space left"):
        run.team.meet()


def test_weights_that_are_not_finite_end_the_run(run):
    with torch.no_grad():
        run.model.weight[0, 0] = torch.inf
    run.saver.save()
    assert run.saver.step == 0
    with pytest.raises(NotFiniteError, match=r"weight of model\.safetensors holds NaN"):
        run.team.meet()


def test_what_nobody_foresaw_is_raised_too(run, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(checkpoint, "write_step", broken)
    run.saver.save()
    run.saver.close()
    with pytest.raises(ZeroDivisionError, match="nobody foresaw this"):
        run.team.meet()


def test_the_tensors_of_a_checkpoint_are_not_sent_as_a_whole(run):
    """The others get its state; `restore` sends tensor by tensor (tests/test_masters.py)."""
    run.saver.save()
    run.saver.settle()
    sent = []
    run.team.from_first = lambda value: sent.append(value) or value
    origin = Origin("settings", "shards")
    last = last_checkpoint(run.team, run.root.parent, origin, 10)
    assert last.tensors[MODEL].keys() == {"weight", "bias"}
    assert [each.tensors for each in sent] == [{}]
    run.team.first = False
    assert last_checkpoint(run.team, run.root.parent, origin, 10) is None  # it does not look
