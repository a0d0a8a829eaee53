"""Sweeps on a real Slurm of two nodes. Oracle: the same runs, undisturbed, on this machine."""

import json
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fleet import ROOT
from sweeping import ICONS, Sweeping

from launch.outcome import last_checkpoint_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def wait_for(what, seconds=200, every=0.2, told=""):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(every)
    pytest.fail(f"nothing happened in {seconds} s {told}")


class OnSlurm(Sweeping):
    def __init__(self, cluster, folder, points, **more):
        super().__init__(folder, points, env={"SLURM_CONF": str(cluster.settings)}, **more)
        self.cluster = cluster

    def until(self, *states, seconds=200):
        """Wait until all runs are in one of these states, by --status."""
        return wait_for(lambda: set(self.states().values()) <= {*states}, seconds, 1, self.log())

    def log(self, name=None):
        which = "*.out" if name is None else f"*_{list(self.runs).index(name)}_*.out"
        logs = (self.folder / "runs" / "study" / "slurm").glob(which)
        return "".join(f"\n{path.name}:\n{path.read_text()[-3000:]}" for path in logs)

    def job(self, name):
        """The array's element of a run, and where it is."""
        index = list(self.runs).index(name)
        for line in self.cluster("squeue", "-h", "-r", "-o", "%i %F %K %N %T").splitlines():
            job, _, element, *rest = line.split()
            if element == str(index):
                return job, *rest
        pytest.fail(f"{name} is not in the queue")

    def process(self, name, rank=0):
        """The task of a run, if it is there."""
        index = str(list(self.runs).index(name))
        for process in psutil.process_iter():
            try:
                command, environ = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            python = command and Path(command[0]).name.startswith("python")
            if (
                python
                and "submitit.core._submit" in command
                and str(self.folder) in command[-1]
                and environ.get("SLURM_ARRAY_TASK_ID", "0") == index
                and environ["SLURM_PROCID"] == str(rank)
            ):
                return process
        return None

    def freeze(self, step, *names):
        """Stop the runs' processes in the middle, so that what comes cannot come too late."""
        frozen = {}

        def all_frozen():
            for name in names:
                if name not in frozen and len(self.steps(name)) >= step:
                    process = self.process(name)
                    if process is not None:
                        process.suspend()
                        frozen[name] = process
            return len(frozen) == len(names)

        wait_for(all_frozen, every=0.02, told=f"for step {step}")
        return frozen


def signalled(process, number):
    """A signal waits for a stopped process."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigP", "ShdP"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


@contextmanager
def down(cluster):
    """Nothing starts meanwhile."""
    cluster("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        yield
    finally:
        cluster("scontrol", "update", "PartitionName=main", "State=UP")


def test_two_nodes_of_two_processes_train_what_four_and_one_here_do(slurm, tmp_path):
    """Though one of the processes, on the second node, is killed in the middle."""
    settings = {"length.steps": 20, "save.every_minutes": 1e-6}
    sweeps = {
        how: OnSlurm(slurm, tmp_path / how, {"a": {}}, **settings)
        for how in ("slurm", "four", "one")
    }
    sweep = sweeps["slurm"]
    sweep("--nodes", "2", "--processes-per-node", "2")
    wait_for(lambda: len(sweep.steps("a")) >= 5, every=0.02)
    sweep.process("a", rank=3).kill()
    wait_for(lambda: sweep.states() == {"a": "requeued"}, 60, every=0, told=sweep.log())
    sweep.until("finished")
    sweeps["four"]("--executor", "local", "--processes-per-node", "4")
    sweeps["one"]("--executor", "local")
    assert sweep.result("a")["world_size"] == 4
    assert {told[:2] for told in sweep.log().split("hostname=")[1:]} == {"n1", "n2"}
    assert sweep.content("a") == sweeps["four"].content("a")
    expected = sweeps["one"].losses("a")
    assert sweep.losses("a") == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == 20, "nothing was learned"


def test_preempted_timed_out_and_killed_runs_end_as_if_nothing_had_happened(slurm, tmp_path):
    points = {name: {"optim.lr": lr} for name, lr in (("a", 1e-4), ("b", 2e-4), ("c", 3e-4))}
    settings = {
        "length.steps": 24,
        "eval.every_steps": 10,
        "eval.validation_classes": 0.1,
        "save.every_minutes": 0.02,
        # Half a node each: one of them has a node to itself, and is the one to be preempted.
        "slurm": {"partition": "low", "minutes": 1, "cpus_per_process": 8},
    }
    sweep = OnSlurm(slurm, tmp_path / "slurm", points, **settings)
    assert "submitted 3 of 3 runs as job" in sweep()
    wait_for(lambda: all(sweep.job(name)[-1] == "RUNNING" for name in points))
    node = {name: sweep.job(name)[1] for name in points}
    (preempted,) = (name for name in points if [*node.values()].count(node[name]) == 1)
    _timed_out, killed = (name for name in points if name != preempted)
    for name in (preempted, killed):
        slurm("scontrol", "update", f"JobId={sweep.job(name)[0]}", "TimeLimit=10")

    frozen = sweep.freeze(11, *points)
    before = {name: len(sweep.steps(name)) for name in points}
    assert max(before.values()) < 24, "in the middle"
    said = sweep("--status")
    for name in (preempted, killed):
        (row,) = (line.split() for line in said.splitlines() if line.startswith(f"{name}-seed0"))
        assert row[1] == "running"
        assert row[5] == f"{before[name]}/24"
        assert row[6].endswith("%"), "Recall@1 of the validation classes"
    assert "submitted 0 of 3" in sweep(), "all are on their way"

    frozen.pop(killed).kill()
    kept = last_checkpoint_step(sweep.runs[killed])
    slurm(
        "sbatch",
        "-p",
        "main",
        "-N1",
        "-w",
        node[preempted],
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 1",
    )
    requeued = set()

    def all_were_requeued():
        for process in frozen.values():  # Slurm resumes what it signals; should it not, we do
            if signalled(process, signal.SIGUSR2):
                process.resume()
        requeued.update(name for name, state in sweep.states().items() if state == "requeued")
        return requeued == {*points}

    wait_for(all_were_requeued, every=0, told=f"{requeued} {sweep.log()}")
    sweep.until("finished")

    here = Sweeping(tmp_path / "here", points, **settings)
    assert "3 finished" in here("--executor", "local")
    for name in points:
        assert sweep.content(name) == here.content(name)
        trained = sweep.steps(name, "timing.jsonl")
        twice = {step for step in trained if trained.count(step) > 1}
        stopped = "dml/train.py: stopped by SIG" in sweep.log(name)
        assert stopped == (name != killed), "it went as it was meant to"
        if name == killed:
            assert twice <= set(range(kept + 1, before[name] + 2))
        else:
            assert twice == set(), "what a signal ends is saved first"
        assert sorted({*trained}) == [*range(1, 25)]
    assert "submitted 0 of 3" in sweep()


def test_a_run_that_fails_for_good_tells_why_and_does_not_block_the_others(slurm, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(ICONS, shards)
    points = {"good": {}, "bad": {"data.shards": str(shards)}}
    sweep = OnSlurm(slurm, tmp_path / "sweep", points, **{"length.steps": 5})
    with down(slurm):
        sweep()
        assert sweep.states() == {"good": "pending", "bad": "pending"}
        shards.rename(tmp_path / "away")
    sweep.until("finished", "failed")
    assert sweep.states() == {"good": "finished", "bad": "failed"}
    said = sweep("--status")
    assert f"bad-seed0 failed: {shards}" in said
    assert f"  | dml/train.py: {shards}" in said, "the log's last lines"
    failed = json.loads((sweep.runs["bad"] / "failed.json").read_bytes())
    assert failed["code"] == 2
    assert failed["log"][-1] in said

    assert "submitted 0 of 2" in sweep(), "it would fail again"
    (tmp_path / "away").rename(shards)
    assert "submitted 1 of 2" in sweep("--resubmit-failed")
    sweep.until("finished")
    assert not (sweep.runs["bad"] / "failed.json").exists()


def test_doctor_measures_the_network_between_the_nodes(slurm, tmp_path):
    found = tmp_path / "found.json"
    doctor = f"{sys.executable} -m dml.cli doctor --json --dir {tmp_path} > {found}"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--chdir={ROOT}", f"--output={tmp_path}/log"]
    slurm("sbatch", *options, "--wrap", doctor)
    wait_for(lambda: found.exists() and found.read_text().endswith("]\n"), told="to doctor")
    links = {each["name"]: each["state"] for each in json.loads(found.read_text())}
    assert links["to n1"] in ("ok", "warning"), found.read_text()
    assert links["to n2"] in ("ok", "warning"), found.read_text()


def test_cancelled_runs_stay_away_until_the_sweep_is_started_again(slurm, tmp_path):
    other = slurm("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 100").strip()
    points = {"first": {}, "second": {}}
    sweep = OnSlurm(
        slurm, tmp_path / "sweep", points, slurm={"parallel": 1}, **{"length.steps": 12}
    )
    sweep()
    sweep.freeze(3, "first")  # to be resumed by what ends it
    assert sweep.states() == {"first": "running", "second": "pending"}
    assert "cancelled 2 jobs" in sweep("--cancel")
    jobs = wait_for(lambda: slurm("squeue", "-h", "-o", "%i").split())
    wait_for(lambda: slurm("squeue", "-h", "-o", "%i").split() == [other], told=str(jobs))
    assert sweep.states() == {"first": "stopped", "second": "stopped"}
    slurm("scancel", other)
    done = max(sweep.steps("first"))
    assert "submitted 2 of 2" in sweep()
    sweep.until("finished")
    assert sweep.steps("first") == [*range(1, 13)]
    assert sweep.steps("first", "timing.jsonl")[done] == done + 1, "it was saved, and continued"


def test_a_search_goes_on_to_the_test_classes_by_itself(slurm, tmp_path):
    """--watch submits the runs of the chosen setting as soon as the search has ended, in arrays of their
    own; called again, there is nothing left to do."""
    tune = {"grid": {"optim.lr": [1e-4, 1e-3]}, "validation_classes": 0.2}
    study = OnSlurm(slurm, tmp_path / "search", {"a": {}}, tune=tune, **{"length.steps": 4})
    said = study("--watch", "1")
    assert said.count("submitted 2 of 2 runs as job") == 1
    assert said.count("submitted 1 of 1 runs as job") == 1
    tried = study.folder / "runs" / "study" / "tune"
    scores = {
        lr: json.loads((tried / f"a-lr{lr}-seed0" / "result.json").read_bytes())
        for lr in ("0.0001", "0.001")
    }
    assert not any("recall@1" in score for score in scores.values())
    best = max(scores, key=lambda lr: scores[lr]["validation_recall@1"])
    assert f"lr: {best}\n" in (study.runs["a"] / "config.yaml").read_text()
    assert study.result("a")["recall@1"] > 0
    assert "submitted 0 of 1 runs;" in study("--watch", "1")
