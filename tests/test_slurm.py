"""The launcher without Slurm: what it would submit, how runs end, and sweeps on this machine."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from fleet import ROOT, environment
from sweeping import Sweeping

from launch.job import FIRST_PORT, PORTS, Job, distributed, job_of
from launch.outcome import PATIENCE, sentence, settle
from launch.status import at_work, work_on
from launch.submission import groups, script
from launch.sweep import read_sweep

GOLDEN = ROOT / "tests" / "golden" / "sop_batch_size.sbatch"
SOP = "configs/sweeps/sop_batch_size.yaml"

# ---- what would be submitted ------------------------------------------------------------------------


def test_the_batch_script_of_the_sop_study(monkeypatch):
    """Two nodes of eight GPUs; to renew it, write what is found to the file, and read the diff."""
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(SOP)
    ((resources, runs),) = (
        (r, runs) for r, runs in groups(sweep.runs).items() if (r.nodes, r.gpus_per_node) == (2, 8)
    )
    assert {run.name[:5] for run in runs} == {"bs320", "bs640"}
    text = script("sop_batch_size-NUMBER", resources, len(runs), ROOT / "runs" / sweep.name)
    found = text.replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT")
    assert found.rstrip() + "\n" == GOLDEN.read_text()


def launch(*arguments, **more):
    return subprocess.run(
        [sys.executable, "launch/slurm.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_dry_run_needs_neither_slurm_nor_torch(tmp_path):
    code = (
        "import sys; from launch.slurm import main; "
        f"code = main(['--sweep', '{SOP}', '--dry-run', '--set', 'run.dir={tmp_path}/runs']); "
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(PATH=""),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.endswith("False 0\n"), done.stderr
    assert "bs640-seed2  new" in " ".join(done.stdout.split(" ")).replace("   ", "  ")
    assert "21 new" in done.stdout
    assert done.stdout.count("#!/bin/bash") == 5, "an array for every kind of job"
    assert [*tmp_path.iterdir()] == [], "nothing is written"


def test_everything_wrong_with_a_sweep_is_told_before_anything_is_submitted(tmp_path):
    sweep = tmp_path / "study.yaml"
    points = {"odd": {"batch.classes": 15}, "all": {"batch.classes": 501}, "good": {}}
    tree = {"base": str(ROOT / "configs" / "icons_mini.yaml"), "grid": {"point": points}}
    sweep.write_text(yaml.safe_dump(tree, sort_keys=False))
    done = launch("--sweep", sweep, "--processes-per-node", 4)
    assert done.returncode == 2
    assert "45 images are not divisible by 4 processes" in done.stderr
    assert "only 500 classes to train on" in done.stderr
    assert "good" not in done.stderr

    done = launch("--sweep", sweep, "--nodes", 0, "--minutes", "soon", "--set", "batch.clases=4")
    assert done.returncode == 2
    assert "--nodes 0: must be at least 1" in done.stderr
    assert "--minutes soon: must be a whole number" in done.stderr
    assert "did you mean batch.classes?" in done.stderr
    assert "Traceback" not in done.stderr

    done = launch("--sweep", sweep, "--executor", "local", "--nodes", 2)
    assert done.returncode == 2
    assert "set --nodes 1" in done.stderr


def test_without_slurm_the_launcher_says_what_to_do(tmp_path):
    sweep = Sweeping(tmp_path, {"a": {}}, env={"PATH": ""})
    assert "there is no sbatch here; --executor local" in sweep(code=2)


# ---- a task of a job --------------------------------------------------------------------------------


def test_a_task_knows_its_place(monkeypatch):
    from submitit.slurm.slurm import SlurmJobEnvironment

    monkeypatch.setenv("SLURM_JOB_ID", "123456789")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu-[07-08]")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_PROCID", "11")
    monkeypatch.setenv("SLURM_LOCALID", "3")
    found = distributed(SlurmJobEnvironment())
    assert (found["RANK"], found["LOCAL_RANK"]) == ("11", "3")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("16", "8")
    assert found["MASTER_ADDR"] == "gpu-07"
    assert FIRST_PORT <= int(found["MASTER_PORT"]) < FIRST_PORT + PORTS <= 32768


def test_a_job_that_is_requeued_is_the_same_job():
    run = read_sweep(ROOT / SOP).runs[0]
    job = job_of(run)
    assert job.checkpoint().function == job == Job(f"runs/sop_batch_size/{run.name}", job.argv)


# ---- how a run ends ---------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path):
    """A run that ends with a code; returns whether it is started again, and why it failed if so."""
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    said = "dml/train.py: optim.lr is too high\n  lower it\nsrun: error: n1: task 0: Exited\n"
    log.write_text(f"submitit INFO (2026) - Starting\nstep 1\n{said}")

    def end(code, step=0):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        again = settle(folder, code, log)
        path = folder / "failed.json"
        return again, json.loads(path.read_bytes()) if path.exists() else None

    return end


def test_a_finished_run_is_left_alone(ended):
    assert ended(0) == (False, None)


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_is_for_good(ended, code):
    again, failed = ended(code)
    assert not again
    assert failed["reason"] == "optim.lr is too high\n  lower it"
    assert failed["code"] == code
    assert failed["log"][-1] == "srun: error: n1: task 0: Exited"
    assert ended(0) == (False, None), "it was mended"


@pytest.mark.parametrize("code", [1, 75, 128 + signal.SIGKILL])
def test_a_run_that_gets_no_further_is_given_up(ended, code):
    for _ in range(PATIENCE - 1):
        assert ended(code, step=10) == (True, None)
    for _ in range(PATIENCE - 1):  # it got further: the count starts again
        assert ended(code, step=20) == (True, None)
    again, failed = ended(code, step=20)
    assert not again
    assert f"{PATIENCE} times in a row without a checkpoint after step 20" in failed["reason"]


def test_the_reason_is_what_the_training_said_last():
    assert (
        sentence(["dml/train.py: first", "step 3", "dml/train.py: second", "srun: x"]) == "second"
    )
    assert sentence(["Traceback", "ValueError: no"]) == "ValueError: no"
    assert sentence([]) == "it said nothing"


# ---- on this machine --------------------------------------------------------------------------------


def test_a_run_is_held_while_its_processes_live(tmp_path):
    assert not at_work(tmp_path)
    with work_on(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
        assert at_work(tmp_path)
    assert at_work(tmp_path), "the launcher is gone, its process is not"
    child.kill()
    child.wait()
    assert not at_work(tmp_path)


@pytest.mark.slow
def test_a_sweep_on_this_machine(tmp_path):
    points = {"bad": {"model.weights": "/nowhere.pth"}, "good": {}, "late": {"optim.lr": 2e-4}}
    sweep = Sweeping(tmp_path, points, **{"length.steps": 12, "eval.every_steps": 5})
    assert sweep.states() == dict.fromkeys(points, "new")
    said = sweep("--executor", "local", "--processes-per-node", "2", code=1)
    assert "1 failed, 2 finished" in said
    assert "bad-seed0: failed: " in said
    assert "/nowhere.pth" in said
    assert sweep.states() == {"bad": "failed", "good": "finished", "late": "finished"}
    assert sweep.result("good")["world_size"] == 2
    before = (sweep.runs["good"] / "result.json").stat().st_mtime_ns
    assert "1 failed, 2 finished" in sweep("--executor", "local", code=1), "nothing left to do"
    assert (sweep.runs["good"] / "result.json").stat().st_mtime_ns == before
    assert "Recall@1" in sweep("--status")


@pytest.mark.slow
def test_a_sweep_on_this_machine_is_interrupted_killed_and_continued(tmp_path):
    sweep = Sweeping(tmp_path, {"a": {}}, **{"save.every_minutes": 1e-6})

    def until(step):
        deadline = time.monotonic() + 100
        while len(sweep.steps("a")) < step:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with sweep.start("--executor", "local") as launcher:
        until(4)
        assert sweep.states() == {"a": "running"}
        assert "another launcher is at work" in sweep("--executor", "local", code=2)
        (child,) = psutil.Process(launcher.pid).children()
        child.kill()
        child.wait()
        until(14)
        launcher.send_signal(signal.SIGINT)
        said, _ = launcher.communicate(timeout=100)
        assert launcher.returncode == 75, said
    assert "the same command continues" in said
    assert sweep.states() == {"a": "stopped"}
    done = max(sweep.steps("a"))
    assert 14 <= done < 30
    assert "1 finished" in sweep("--executor", "local")
    assert sweep.steps("a") == [*range(1, 31)]
    trained = sweep.steps("a", "timing.jsonl")
    assert trained[trained.index(14) :] == [*range(14, 31)], "a signal saves"
