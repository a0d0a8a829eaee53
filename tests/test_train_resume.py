"""Interrupted runs end as if nothing had happened. Oracle: the same run, undisturbed."""

import os
import random
import signal

import pytest
from fleet import ROOT, WORKERS
from runs import Launched, checkpoints, content, lines, losses
from safetensors.torch import load_file

from dml.run_folder.checkpoint import read_last

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

EVENTFUL = [
    "save.every_minutes=1e-6",  # after every step
    "eval.every_steps=10",
    "eval.validation_classes=0.1",
    "eval.untrained=true",
]
RESUMED = "resuming after step"
RARELY = "save.every_minutes=10"  # only at a signal, and at the end
DDP = ["--config_file", str(ROOT / "configs/accelerate/cpu_x2.yaml")]
ZERO2 = ["--config_file", str(ROOT / "configs/accelerate/zero2.yaml"), "--num_processes", "2"]


def launched(how, folder, *sets, **more):
    return Launched(how, folder, *EVENTFUL, *sets, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing interrupts, made when it is first asked for."""
    known = {}

    def of(how):
        if str(how) not in known:
            run = launched(how, tmp_path_factory.mktemp("undisturbed"))
            assert set(run.end()) == {0}, run.said
            known[str(how)] = run.run
        return known[str(how)]

    return of


# ---- killed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kills", "last", "whole"),
    [([(DDP, 0), (2, 1)], DDP, 2), ([(ZERO2, 1)], "zero2", "zero2")],
    ids=["ddp-0-1", "zero2-1"],
)
def test_killed_at_any_step_a_run_gives_the_same_bits(undisturbed, kills, last, whole, tmp_path):
    """Under DDP twice, the second time after it was resumed. Some of the runs are started by accelerate
    and some are not: the launcher makes no difference either."""
    expected = content(undisturbed(whole))
    for n, (how, rank) in enumerate(kills):
        run = launched(how, tmp_path)
        step = random.Random(f"{how}{rank}").randrange(2, 12) + 12 * n
        run.until(step).rank(rank).kill()
        assert 0 not in run.end()
        assert not (run.run / "result.json").exists()
        assert (RESUMED in run.said) == (n > 0)
    again = launched(last, tmp_path)
    assert set(again.end()) == {0}, again.said
    assert RESUMED in again.said
    assert content(again.run) == expected


def test_killed_in_the_middle_of_a_checkpoint(undisturbed, tmp_path):
    """The process that writes is killed before each of the syncs of a checkpoint in turn, and the
    same command resumes the run every time."""
    synced = ["metrics.jsonl", "model.safetensors", "optimizer.safetensors", "state.json"]
    for n, name in enumerate([*synced, ".writing", "checkpoints"]):
        run = launched(2, tmp_path, program=(WORKERS / "dying.py", name))
        assert run.end()[0] == -signal.SIGKILL, f"{name} is never synced: {run.said}"
        assert (RESUMED in run.said) == (n > 0)
    again = launched(2, tmp_path)
    assert again.end() == [0, 0], again.said
    assert RESUMED in again.said
    assert content(again.run) == content(undisturbed(2))


# ---- asked to leave -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "sent", "rank"), [(2, signal.SIGTERM, 1), (3, signal.SIGUSR2, 0)]
)
def test_a_signal_to_one_process_saves_and_ends_all(undisturbed, processes, sent, rank, tmp_path):
    """As a scheduler sends it some time before it kills; here to one process alone."""
    run = launched(processes, tmp_path, RARELY)
    run.until(5).rank(rank).send_signal(sent)
    assert run.end(timeout=60) == [75] * processes, run.said
    assert run.said.count("the same command resumes") == 1
    (saved,) = checkpoints(run.run)
    again = launched(processes, tmp_path, RARELY)
    assert set(again.end()) == {0}, again.said
    assert f"{RESUMED} {int(saved.name[5:])}" in again.said
    assert content(again.run) == content(undisturbed(processes))


def test_a_signal_to_every_process_of_the_job_saves_too(tmp_path):
    """The loader's workers included, as Slurm sends it."""
    run = launched(1, tmp_path, "data.workers=2", RARELY).until(5)
    os.killpg(run.processes[0].pid, signal.SIGTERM)
    assert run.end(timeout=60) == [75], run.said
    assert "Traceback" not in run.said
    assert len(checkpoints(run.run)) == 1


def test_a_second_signal_does_not_spoil_the_saving(tmp_path):
    run = launched(1, tmp_path, RARELY, program=(WORKERS / "slow_saving.py",))
    run.until(5).processes[0].send_signal(signal.SIGUSR2)
    run.wait_for(lambda: "saving" in run.said, "the checkpoint")
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.end(timeout=60) == [75], run.said
    assert len(checkpoints(run.run)) == 1


def test_a_signal_in_the_set_up_is_an_interruption_too(tmp_path):
    run = launched(1, tmp_path)
    run.wait_for(run.run.exists, "the folder of the run")
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.end(timeout=60) == [75], run.said


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path):
    """The evaluation of one image at a time takes long; it is given up, and repeated on resuming."""
    slow = ["engine.micro_batch=1", RARELY, "length.steps=10"]
    run = launched(1, tmp_path, *slow)
    run.until(10).rank(0).send_signal(signal.SIGTERM)
    assert run.end(timeout=60) == [75], run.said
    assert [line for line in lines(run.run) if line.get("split") == "validation"] == []
    again = launched(1, tmp_path, *slow)
    assert again.end() == [0], again.said
    assert [line["step"] for line in lines(again.run) if line.get("split") == "validation"] == [10]


# ---- resumed elsewhere ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """On two machines, interrupted, and resumed after the last checkpoint was damaged. Returns the
    launch that resumed, the machines, and the checkpoints before the damage."""
    folder = tmp_path_factory.mktemp("machines")
    machines = [folder / "0", folder / "1"]
    for machine in machines:
        machine.mkdir()

    def start():
        run = launched(2, folder, "run.dir=runs", machines=machines)
        run.run = machines[0] / "runs" / "icons_mini"
        return run

    run = start()
    run.until(5).rank(0).send_signal(signal.SIGTERM)
    assert run.end() == [75, 75], run.said
    saved = checkpoints(run.run)
    model = saved[-1] / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    again = start()
    assert again.end() == [0, 0], again.said
    return again, machines, saved


def test_machines_need_not_share_the_folder_of_the_run(undisturbed, resumed):
    """Only the first process looks into it."""
    again, machines, _ = resumed
    assert content(again.run) == content(undisturbed(2))
    assert not (machines[1] / "runs").exists()


def test_a_damaged_checkpoint_is_skipped_and_named(undisturbed, resumed):
    again, machines, (before, last) = resumed
    last = last.relative_to(machines[0])
    assert f"is skipped: {last}: model.safetensors differs from its checksum" in again.said
    assert f"{RESUMED} {int(before.name[5:])}" in again.said
    assert content(again.run) == content(undisturbed(2))


def test_a_run_may_go_on_with_other_processes_and_engines(undisturbed, tmp_path):
    """Some steps with three processes, some under ZeRO-3 with two, and the rest with one."""
    for how, step in ((3, 6), ("zero3", 14)):
        run = launched(how, tmp_path)
        run.until(step).rank(0).send_signal(signal.SIGTERM)
        assert 0 not in run.end(), run.said
    rest = launched(1, tmp_path)
    assert rest.end() == [0], rest.said
    expected = undisturbed(2)
    assert losses(rest.run) == pytest.approx(losses(expected), rel=1e-4)
    before, after = (load_file(run / "model.safetensors") for run in (expected, rest.run))
    assert all((before[k] - after[k]).abs().max() < 1e-3 for k in before)


# ---- diverged -------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tmp_path):
    """From step 8 on a rate that no network survives."""
    wild = ["optim.name=sgd", "optim.schedule=step", "optim.milestones=[7]", "optim.gamma=1e38"]
    run = launched(2, tmp_path, *wild, "optim.lr=1e-3")
    assert run.end() == [3, 3], run.said
    assert "training diverged between step" in run.said
    assert "Traceback" not in run.said
    last, damaged = read_last(run.run / "checkpoints")
    assert damaged == []
    assert last.state["step"] in (7, 8)
    assert all(x.isfinite().all() for x in last.tensors["model.safetensors"].values())
