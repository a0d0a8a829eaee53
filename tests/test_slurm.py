"""The launcher without Slurm: what it would submit, how runs end, and sweeps on this machine."""

import errno
import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from fleet import ROOT, environment, program
from sweeping import Sweeping

from dml.config import load, to_yaml
from launch import job as jobs
from launch import slurm_commands
from launch.job import FIRST_PORT, PORTS, Job, job_of, task_environment
from launch.outcome import MAX_STARTS, record_outcome, training_message
from launch.slurm import main
from launch.slurm_commands import SlurmError, slurm
from launch.status import hold_run, is_running_here
from launch.submission import (
    batch_script,
    group_by_resources,
    lock_sweep,
    queued_jobs,
    setup_lines,
)
from launch.sweep import read_sweep

GOLDEN = ROOT / "tests" / "golden" / "sop_batch_size.sbatch"
SOP = "configs/sweeps/sop_batch_size.yaml"

# ---- what would be submitted ------------------------------------------------------------------------


def test_the_batch_script_of_the_sop_study(monkeypatch):
    """Two nodes of eight GPUs. To update the golden file, write `found` to it and read the diff."""
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(SOP)
    ((resources, runs),) = (
        (needs, runs)
        for needs, runs in group_by_resources(sweep.runs).items()
        if (needs.nodes, needs.gpus_per_node) == (2, 8)
    )
    assert {run.name[:5] for run in runs} == {"bs320", "bs640"}
    text = batch_script("sop_batch_size-NUMBER", resources, len(runs), ROOT / "runs" / sweep.name)
    found = text.replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT")
    assert found.rstrip() + "\n" == GOLDEN.read_text()


SITE = """
base: [icons_mini.yaml]
grid:
  how:
    typed: {slurm: {deepspeed: zero2, gpu_type: a100}}
    listed: {slurm: {nodes: 2, gres: "gpu:h100:4,nvme:1", accelerate: configs/accelerate/zero3.yaml}}
slurm:
  processes_per_node: 4
  gpus_per_node: 4
  cpus_per_process: 8
  partition: gpu
  account: vision
  qos: high
  modules: [cuda/12.4, "gcc (13)"]
  setup: ["source ~/site.sh", "ulimit -n 65536"]
  environment: {NCCL_SOCKET_IFNAME: "=ib0,ib1", NCCL_IB_GID_INDEX: 3, SITE: "a $HOME b"}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A sweep with every key that sites differ in."""
    monkeypatch.chdir(ROOT)
    base = ROOT / "configs" / "icons_mini.yaml"
    path = tmp_path / "site.yaml"

    def read(text=SITE):
        path.write_text(text.replace("icons_mini.yaml", str(base)))
        return read_sweep(path)

    return read


@pytest.mark.parametrize("how", ["typed", "listed"])
def test_the_batch_script_of_a_site(site, how):
    """To update the golden file, write `found` to it and read the diff."""
    (run,) = (run for run in site().runs if run.label == how)
    text = batch_script("site-NUMBER", run.resources, 1, ROOT / "runs" / "site")
    found = text.replace(sys.executable, "PYTHON")
    found = found.replace(str(Path(sys.executable).parent), "BIN").replace(str(ROOT), "ROOT")
    assert found.rstrip() + "\n" == (GOLDEN.parent / f"site_{how}.sbatch").read_text()


def test_the_shell_sets_up_what_the_script_says(site):
    """By bash itself, with a `module` that notes what it is asked for."""
    (run, _) = site(SITE.replace("source ~/site.sh", "true").replace("65536", "512")).runs
    lines = "\n".join(setup_lines(run.resources))
    script = f'module() {{ printf "%s|" "$@"; }}\n{lines}\necho; ulimit -n; env'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    loaded, limit, *variables = done.stdout.splitlines()
    assert loaded == "load|cuda/12.4|gcc (13)|"
    assert limit == "512"
    assert "NCCL_SOCKET_IFNAME==ib0,ib1" in variables
    assert "SITE=a $HOME b" in variables
    assert "ACCELERATE_USE_DEEPSPEED=true" in variables
    script = f"module() {{ false; }}\n{lines}\necho went on"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_flags_take_the_place_of_the_section(site, tmp_path):
    site()
    flags = ["--qos", "low", "--modules", "cuda/13", "--environment", "NCCL_DEBUG=INFO", "A=b=c"]
    done = launch("--sweep", tmp_path / "site.yaml", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    for line in ("#SBATCH --qos=low", "module load cuda/13 || exit 1", "export NCCL_DEBUG=INFO"):
        assert done.stdout.count(f"\n{line}\n") == 2
    assert "export A=b=c\n" in done.stdout
    assert "NCCL_SOCKET_IFNAME" not in done.stdout
    wrong = ["--environment", "NCCL_DEBUG", "--deepspeed", "zero9", "--gpu-type", "a 100"]
    done = launch("--sweep", tmp_path / "site.yaml", "--dry-run", *wrong)
    assert done.returncode == 2
    for said in (
        "--environment NCCL_DEBUG: the value of NCCL_DEBUG must be printable text or a number",
        "--deepspeed zero9: must be text, one of zero1, zero2, zero3",
        "--gpu-type a 100: must be text, letters, digits, and . _ -",
    ):
        assert said in done.stderr


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
    assert "bs640-seed2  new" in done.stdout.replace("   ", "  ")
    assert "21 new" in done.stdout
    assert done.stdout.count("#!/bin/bash") == 5, "an array per kind of resources"
    assert [*tmp_path.iterdir()] == [], "nothing is written"


def test_a_reader_may_leave(tmp_path):
    """... --dry-run | head"""
    command = [sys.executable, "launch/slurm.py", "--sweep", SOP, "--dry-run"]
    command += ["--set", f"run.dir={tmp_path}/runs"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes) as process:
        process.stdout.close()
        complaint = process.stderr.read()
    assert process.returncode == 0
    assert "Broken" not in complaint


def test_everything_wrong_with_a_sweep_is_reported_before_anything_is_submitted(tmp_path):
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
    assert "--nodes 0: must be a whole number, at least 1" in done.stderr
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
    found = task_environment(SlurmJobEnvironment())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = task_environment(SlurmJobEnvironment())
    assert found["MASTER_PORT"] != again["MASTER_PORT"], "it may be busy"
    assert (found["RANK"], found["LOCAL_RANK"]) == ("11", "3")
    monkeypatch.setenv("SLURM_LOCALID", "5")  # --distribution=cyclic: 11 is the sixth of node 1
    assert task_environment(SlurmJobEnvironment())["LOCAL_RANK"] == "5"
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
    started = "submitit INFO (2026) - Starting with JobEnvironment\n"
    log.write_text(f"{started}dml/train.py: old\n{started}step 1\n{said}")

    def end(code, step=0):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        again = record_outcome(folder, code, [log])
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
    assert ended(0) == (False, None), "the mistake was fixed"


@pytest.mark.parametrize("code", [1, 75, 128 + signal.SIGKILL])
def test_a_run_that_gets_no_further_is_given_up(ended, code):
    for _ in range(MAX_STARTS - 1):
        assert ended(code, step=10) == (True, None)
    for _ in range(MAX_STARTS - 1):  # it got further: the count starts again
        assert ended(code, step=20) == (True, None)
    again, failed = ended(code, step=20)
    assert not again
    assert f"{MAX_STARTS} times in a row without a checkpoint after step 20" in failed["reason"]


def test_the_reason_is_what_the_training_said_last():
    said = ["dml/train.py: first", "step 3", "dml/train.py: second", "  more", "srun: x", "W123"]
    assert training_message(said) == "second\n  more"
    crash = ["Traceback (most recent call last):", "  File x", "ValueError: no", "Exiting"]
    assert training_message(crash) == "ValueError: no"
    assert training_message([]) == "its log is empty"


def given_up(tmp_path, code, *texts):
    """Why a run failed in the end, by the logs of its processes."""
    logs = [tmp_path / f"7_{rank}_log.out" for rank in range(len(texts))]
    for log, text in zip(logs, texts, strict=True):
        log.write_text(text)
    folder = tmp_path / "run"
    folder.mkdir()
    while record_outcome(folder, code, logs):
        pass
    return json.loads((folder / "failed.json").read_bytes())


def test_a_crash_is_told_by_the_last_start_of_the_process_that_crashed(tmp_path):
    start = "submitit INFO (2026) - Starting with JobEnvironment\n"
    traceback = "Traceback (most recent call last):\n  File x\n"
    failed = given_up(
        tmp_path,
        1,
        f"{start}dml/train.py: stopped by SIGTERM\n{start}{traceback}RuntimeError: Connection lost\n",
        f"{start}{traceback}KeyError: old\n{start}step 1\n",
        f"{start}[rank2]: {traceback}ValueError: no\nsrun: x\n",
    )
    assert failed["reason"].endswith(": process 2: ValueError: no")
    assert failed["log"][-1] == "srun: x"


def test_too_little_memory_is_told_by_the_process_that_met_it(tmp_path):
    lost = "Traceback (most recent call last):\n  File x\nRuntimeError: Connection closed by peer\n"
    failed = given_up(tmp_path, 1, lost, "dml/train.py: the memory of the GPU is full\n", lost)
    assert failed["reason"].endswith(": process 1: the memory of the GPU is full")


def test_memory_is_blamed_only_if_a_log_does(tmp_path):
    for name, text in (("a", "step 1\n"), ("b", "slurmstepd: error: Detected 1 oom_kill event\n")):
        (tmp_path / name).mkdir()
        failed = given_up(tmp_path / name, 128 + signal.SIGKILL, "step 1\n", text)
        assert ("out of memory" in failed["reason"]) == (name == "b")
        assert "SIGKILL" in failed["reason"]


def test_a_requeue_is_tried_again(monkeypatch):
    answers = [SlurmError("no answer"), "RUNNING\n", SlurmError("busy"), "RUNNING\n", ""]
    asked = []

    def answer(*command):
        asked.append(command[0])
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(jobs, "slurm", answer)
    monkeypatch.setattr(jobs, "PAUSE_SECONDS", 0)
    assert jobs.requeue("7_1") is None
    assert asked == ["squeue", "squeue", "scontrol", "squeue", "scontrol"]
    answers += [SlurmError("busy")] * 3
    assert jobs.requeue("7_1") == "busy"
    answers += ["COMPLETING\n"]
    assert jobs.requeue("7_1") is None, "somebody has cancelled it"


def test_a_command_of_slurm_fails_with_its_own_words(monkeypatch):
    assert slurm("sh", "-c", "echo out") == "out\n"
    assert slurm("printf", r"caf\351") == "caf\ufffd", "the name of somebody's job"
    with pytest.raises(SlurmError, match=r"^sh: no such job$"):
        slurm("sh", "-c", "echo no such job >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^sh: exit code 3$"):
        slurm("sh", "-c", "exit 3")
    with pytest.raises(SlurmError, match=r"no-such-program: .*No such file"):
        slurm("no-such-program")
    monkeypatch.setattr(slurm_commands, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(SlurmError, match=r"sleep: .*timed out after 0\.1 seconds"):
        slurm("sleep", "60")


# ---- the state of the runs ---------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """A sweep of two runs; what the launcher says, which is called here: it is faster."""
    monkeypatch.setenv("PATH", "")
    sweep = Sweeping(tmp_path, {"a": {}, "b": {}})
    (tmp_path / "runs" / "study").mkdir(parents=True)

    def say(*arguments, code=0):
        found = main(["--sweep", str(sweep.path), *arguments])
        said = "".join(capsys.readouterr())
        assert found == code, said
        return said

    say.submissions, say.path = tmp_path / "runs" / "study" / "sweep.json", sweep.path
    say.runs = {run.name[0]: run for run in read_sweep(sweep.path).runs}
    say.folders = sweep.runs
    return say


def row(said, name):
    return next(line for line in said.splitlines() if line.startswith(f"{name}-seed0"))


def record_submission(study, **entry):
    entry = {"name": "study-123", "runs": ["a-seed0", "b-seed0"], "job": "7", **entry}
    study.submissions.write_text(json.dumps({"submissions": [entry]}))


def test_a_run_of_another_config_is_not_this_one(study):
    config = study.runs["a"].config
    for name in "ab":
        study.folders[name].mkdir()
        (study.folders[name] / "result.json").write_text('{"step": 30, "recall@5": 0.5}')
        (study.folders[name] / "config.yaml").write_text(to_yaml(study.runs[name].config))
    assert "2 finished" in study("--status")
    (study.folders["a"] / "config.yaml").write_text(
        to_yaml(config).replace("steps: 30", "steps: 3")
    )
    (study.folders["b"] / "config.yaml").write_text("run: {nam: b}\n")
    said = study("--status")
    assert "other config" in row(said, "a")
    assert "length.steps was 3 and is 30" in row(said, "a")
    assert "not a config of this version" in row(said, "b")
    for executor in ("slurm", "local"):
        said = study("--executor", executor, code=2)
        assert f"{study.folders['a']} is a run of another config: length.steps was 3" in said
        assert f"{study.folders['b']} is a run of another config" in said
    assert "cancelled 0 jobs" in study("--cancel")


# what config.yaml and plan.json say, and the length of the result, where the sweep asks for 30 steps
@pytest.mark.parametrize(
    ("before", "planned", "result", "state"),
    [
        (30, 30, 30, "finished"),
        (20, 20, 20, "stopped"),  # the sweep became longer
        (30, 30, 20, "stopped"),  # and its run has begun
        (30, 31, 31, "finished"),  # the training knew the shards better
        (30, None, None, "finished"),  # of an earlier version
    ],
)
def test_a_sweep_that_became_longer_is_not_finished(tmp_path, before, planned, result, state):
    sweep = Sweeping(tmp_path, {"a": {}}, **{"optim.schedule": "constant"})
    folder = sweep.runs["a"]
    folder.mkdir(parents=True)
    config = to_yaml(read_sweep(sweep.path).runs[0].config)
    (folder / "config.yaml").write_text(config.replace("steps: 30\n", f"steps: {before}\n"))
    scores = {"step": 20, "recall@1": 0.5} | ({"planned_steps": result} if result else {})
    (folder / "result.json").write_text(json.dumps(scores))
    if planned:
        (folder / "plan.json").write_text(json.dumps({"steps": planned}))
    assert state in row(sweep("--status"), "a")


def test_a_run_that_was_submitted_and_is_gone_has_stopped(study, monkeypatch):
    record_submission(study)
    monkeypatch.setattr("launch.starting.queued_jobs", lambda folder: {})
    log = study.submissions.parent / "slurm" / "7_1_0_log.out"
    log.parent.mkdir()
    log.touch()
    said = study("--status")
    assert row(said, "a").split()[1] == row(said, "b").split()[1] == "stopped"
    assert "7_0 has left the queue; it has no log" in row(said, "a")
    assert row(said, "b").endswith(f"7_1 has left the queue; its log: {log}")


def test_jobs_are_found_whoever_submitted_them(study, monkeypatch):
    record_submission(study)
    lines = ["7 1 CONFIGURING 0 renamed None", "9 0 RUNNING 0 study-123 None", "8 N/A PENDING 0"]
    monkeypatch.setattr("launch.submission.is_installed", bool)
    monkeypatch.setattr("launch.submission.slurm", lambda *command: "\n".join(lines))
    assert {run: job.job for run, job in queued_jobs(study.submissions.parent).items()} == {
        "b-seed0": "7_1",
        "a-seed0": "9_0",
    }
    assert row(study("--status"), "b").endswith("7_1: CONFIGURING, None")


def test_without_a_queue_to_ask_nothing_is_started(study):
    record_submission(study)
    assert "there is no squeue here" in study(code=2)
    assert "there is no squeue here" in study("--executor", "local", code=2)
    said = study("--status")
    assert "the queue is unknown" in said
    assert "2 unknown" in said
    assert row(said, "b").endswith("submitted as 7_1")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"submissions": [{}]}'])
def test_a_damaged_record_of_submissions_is_named(study, text):
    study.submissions.write_text(text)
    assert f"{study.submissions} is damaged" in study("--status", code=2)


@pytest.mark.parametrize("file", ["result.json", "failed.json"])
def test_a_damaged_file_of_a_run_is_named(study, file):
    study.folders["a"].mkdir()
    (study.folders["a"] / file).write_text("{")
    said = study("--status")
    assert row(said, "a").split()[1] == "damaged"
    assert f"{study.folders['a'] / file} is damaged" in row(said, "a")
    assert row(said, "b").split()[1] == "new"
    assert "1 new, 1 damaged" in said
    assert f"a-seed0: {study.folders['a'] / file} is damaged" in study(code=2)


def test_a_damaged_line_is_skipped(study):
    folder = study.folders["a"]
    folder.mkdir()
    glued = '{"step": 9}{"step": 9}\n12\n\0\0\n'
    (folder / "metrics.jsonl").write_text(f'{{"step": 4}}\n{glued}{{"step": 5}}\n{{"st')
    (folder / "timing.jsonl").write_text(f'{{"step": 4, "images_per_second": 9}}\n{glued}')
    assert "5/30" in row(study("--status"), "a")


def test_missing_files_are_reported_before_anything_is_started(study):
    away = ("--set", "data.shards=/no/shards", "model.weights=/no/weights.pth")
    for executor in ("slurm", "local"):
        said = study("--executor", executor, *away, code=2)
        assert "data.shards = /no/shards: there are no shards" in said
        assert "model.weights = /no/weights.pth: there is no such file" in said
    assert "/no/weights.pth: there is no such file" in study("--dry-run", *away)


def test_the_status_is_shown_and_jobs_are_cancelled_without_a_plan(study):
    said = study("--status", "--processes-per-node", "7")
    assert "the numbers of the plans are missing" in said
    assert "2 new" in said
    assert "cancelled 0 jobs" in study("--cancel", "--processes-per-node", "7")


def test_a_folder_that_cannot_be_written_is_reported(study, tmp_path):
    (tmp_path / "file").touch()
    said = study("--set", f"run.dir={tmp_path}/file", code=2)
    assert f"{tmp_path}/file/study cannot be written" in said
    assert "set run.dir" in said


def test_without_submitit_the_launcher_says_what_to_install(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install -e '.[slurm]'" in study(code=2)


def test_what_was_submitted_before_a_refusal_is_reported(study, monkeypatch):
    def submit(executor, job):
        if "b-seed0" in job.folder:
            raise RuntimeError("sbatch: error: no such partition")
        return SimpleNamespace(job_id="7")

    tree = yaml.safe_load(study.path.read_text())
    tree["grid"]["point"]["b"]["slurm"] = {"partition": "nowhere"}
    study.path.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr("launch.submission.is_installed", bool)
    monkeypatch.setattr("submitit.SlurmExecutor.__init__", lambda *a, **k: None)
    monkeypatch.setattr("submitit.SlurmExecutor.update_parameters", lambda *a, **k: None)
    monkeypatch.setattr("submitit.SlurmExecutor.batch", lambda *a: nullcontext())
    monkeypatch.setattr("submitit.SlurmExecutor.submit", submit)
    said = study(code=2)
    assert (
        "b-seed0 and the runs with the same resources were not submitted: sbatch: error: no such"
        in said
    )
    assert "job 7 was" in said


def test_watch_goes_with_status(study, capsys):
    assert "--watch needs --status, or a sweep with a section tune" in study("--watch", "5", code=2)
    for wrong in (["--watch", "0"], ["--watch", "5", "--dry-run"]):
        with pytest.raises(SystemExit):
            study(*wrong)
        assert "--watch SECONDS" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_where_there_are_no_locks_the_work_goes_on(tmp_path, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_sweep(tmp_path), hold_run(tmp_path):
        assert not is_running_here(tmp_path)


# ---- single runs of a sweep -------------------------------------------------------------------------


def listed(said):
    """The names in a table of runs."""
    return re.findall(r"^(\S+-seed0) ", said, re.MULTILINE)


def test_only_restricts_every_action(study, monkeypatch):
    assert listed(study("--status")) == ["a-seed0", "b-seed0"]
    assert listed(study("--status", "--only", "b")) == ["b-seed0"]
    said = study("--dry-run", "--only", "b-seed0")
    assert listed(said) == ["b-seed0"]
    assert "--array" not in said, "one run is no array"

    submitted = []

    def submit(sweep, runs):
        submitted.append([run.name for run in runs])
        return ["7"]

    monkeypatch.setattr("launch.starting.submit", submit)
    said = study("--only", "b")
    assert "submitted 1 of 1 runs as job 7" in said
    study.folders["a"].mkdir()
    (study.folders["a"] / "failed.json").write_text('{"reason": "x", "log": [], "code": 2}')
    assert "submitted 1 of 1" in study("--only", "a", "--resubmit-failed")
    assert submitted == [["b-seed0"], ["a-seed0"]]

    record_submission(study)
    lines = ["7 0 RUNNING 0 study-123 None", "7 1 RUNNING 0 study-123 None"]
    asked = []
    monkeypatch.setattr("launch.submission.is_installed", bool)

    def answer(*command):
        asked.append(command)
        return "\n".join(lines)

    monkeypatch.setattr("launch.submission.slurm", answer)
    assert "cancelled 1 jobs" in study("--cancel", "--only", "b")
    assert asked[-1] == ("scancel", "7_1")


def test_only_restricts_the_runs_on_this_machine(study, monkeypatch):
    started = []
    monkeypatch.setattr("launch.local.run_here", lambda run, update: started.append(run.name))
    study("--executor", "local", "--only", "b", code=1)  # nothing ran, so it is not finished
    assert started == ["b-seed0"]
    said = study("--executor", "local", "--only", "c", code=2)
    assert "--only c: no such run; the runs are a, b, each with -seed0" in said


def test_the_nodes_of_other_runs_do_not_matter(study):
    tree = yaml.safe_load(study.path.read_text())
    tree["grid"]["point"]["b"]["slurm"] = {"nodes": 2}
    study.path.write_text(yaml.safe_dump(tree))
    assert "set --nodes 1" in study("--executor", "local", "--dry-run", code=2)
    assert "1 new" in study("--executor", "local", "--dry-run", "--only", "a")


def test_a_printed_config_makes_the_same_run(study, tmp_path):
    text = study("--only", "b", "--print-config", "--set", "optim.lr=0.5")
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    (run,) = read_sweep(study.path, ["optim.lr=0.5"]).runs[1:]
    assert load(file) == run.config
    assert text == to_yaml(run.config), "what the run itself writes as config.yaml"
    assert [*(tmp_path / "runs" / "study").iterdir()] == [], "nothing is written"


def test_one_config_is_printed(study):
    said = study("--print-config", code=2)
    assert "--print-config prints one run, not 2; choose one with --only: a-seed0, b-seed0" in said


# ---- what to expect ---------------------------------------------------------------------------------


def test_a_dry_run_shows_the_papers_score_and_the_hours(capsys, tmp_path):
    """By hand: 3.2 million images / 400 per second and GPU = 8,000 s = 2.22 GPU hours per run."""
    here = ["--set", f"run.dir={tmp_path}"]
    assert main(["--sweep", str(ROOT / SOP), "--dry-run", *here]) == 0
    said = capsys.readouterr().out
    table = {line.split()[0]: line.split() for line in said.splitlines() if "-seed" in line[:12]}
    assert table["bs20-seed0"][-3:] == ["71.40", "2.22", "assumed"]
    assert table["bs40-seed2"][-3:] == ["73.82", "1.11", "assumed"], "two GPUs"
    assert table["bs1000-seed1"][-3:] == ["78.35", "0.28", "assumed"], "eight"
    assert said.splitlines()[-1] == (
        "estimate: 46.7 GPU hours of training (speeds: 21 assumed), without evaluations"
    )
    assert "images" not in said.partition("#!/bin/bash")[2].rpartition("estimate:")[0]

    only = ["--only", "bs1000-seed1", "--images-per-second", "800"]
    assert main(["--sweep", str(ROOT / SOP), "--dry-run", *only, *here]) == 0
    said = capsys.readouterr().out
    assert "78.35  0.14 assumed" in said
    assert "estimate: 1.11 GPU hours" in said


def test_the_papers_score_is_that_of_the_whole_study(capsys, tmp_path):
    """At 512 dimensions and a batch of 640 Table 5 has 78.2, the supplement's Table 2 has 78.19."""
    sweep = tmp_path / "study.yaml"
    grid = {"model.embedding_size": [64, 512]}
    sweep.write_text(yaml.safe_dump({"base": str(ROOT / "configs" / "sop.yaml"), "grid": grid}))
    for only in ([], ["--only", "embedding_size512"]):
        assert main(["--sweep", str(sweep), "--dry-run", *only]) == 0
        assert row(capsys.readouterr().out, "embedding_size512").endswith("  78.2")


def test_hours_are_measured_assumed_or_unknown(study):
    """30 steps of 16 x 3 images = 1,440."""
    last = study("--dry-run").splitlines()[-1]
    assert last.startswith("hours unknown: set images_per_second")
    study.folders["a"].mkdir()
    (study.folders["a"] / "metrics.jsonl").write_text('{"step": 15}\n')
    lines = [{"step": 10, "images_per_second": 0.1}, {"step": 15, "images_per_second": 0.3}]
    timing = "".join(json.dumps(line) + "\n" for line in lines)
    (study.folders["a"] / "timing.jsonl").write_text(timing)
    said = study("--dry-run", "--executor", "local")
    assert row(said, "a").endswith("2.00 measured")
    assert row(said, "b").endswith("0/30")
    assert said.splitlines()[-1] == (
        "estimate: 2.00 hours (1.00 left) of training (speeds: 1 measured, 1 unknown), without "
        "evaluations"
    )
    said = study("--dry-run", "--images-per-second", "0.05", "--processes-per-node", "2")
    assert row(said, "a").endswith("2.00 measured"), "its own speed counts"
    assert row(said, "b").endswith("4.00 assumed"), "of two processes"
    assert "estimate: 6.00 hours (5.00 left)" in said


def test_a_finished_run_has_no_hours_left(study):
    study.folders["a"].mkdir()
    (study.folders["a"] / "result.json").write_text('{"step": 20, "recall@1": 0.5}')
    said = study("--dry-run", "--images-per-second", "0.1")
    assert "estimate: 8.00 hours (4.00 left)" in said


# ---- on this machine --------------------------------------------------------------------------------


def test_a_run_is_held_while_its_processes_live(tmp_path):
    assert not is_running_here(tmp_path)
    with hold_run(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
        assert is_running_here(tmp_path)
    assert is_running_here(tmp_path), "the launcher is gone, its process is not"
    child.kill()
    child.wait()
    assert not is_running_here(tmp_path)


@pytest.mark.training
def test_a_sweep_on_this_machine(tmp_path):
    empty = tmp_path / "empty.pth"
    empty.touch()
    points = {"bad": {"model.weights": str(empty)}, "good": {}, "late": {"optim.lr": 2e-4}}
    settings = {"length.steps": 12, "eval.every_steps": 5, "data.size": 16}
    sweep = Sweeping(tmp_path, points, **settings)
    assert sweep.states() == dict.fromkeys(points, "new")
    said = sweep("--executor", "local", "--processes-per-node", "2", code=1)
    assert "1 failed, 2 finished" in said
    assert "bad-seed0: failed: " in said
    assert str(empty) in said
    assert sweep.states() == {"bad": "failed", "good": "finished", "late": "finished"}
    assert sweep.result("good")["world_size"] == 2
    before = (sweep.runs["good"] / "result.json").stat().st_mtime_ns
    assert "1 failed, 2 finished" in sweep("--executor", "local", code=1), "nothing left to do"
    assert "Recall@1" in sweep("--status")
    config = tmp_path / "good.yaml"
    config.write_text(sweep("--only", "good", "--print-config"))
    done = program("dml/train.py", "--config", config)
    assert done.returncode == 0, "the printed config is that of the run, which is finished"
    assert (sweep.runs["good"] / "result.json").stat().st_mtime_ns == before


def test_ctrl_c_between_two_runs_is_an_interruption_too(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.starting.signal.signal", lambda *_: None)  # of all tests
    monkeypatch.setattr("launch.starting.format_summary", interrupt)
    sweep = Sweeping(tmp_path, {"a": {}})
    assert main(["--sweep", str(sweep.path), "--executor", "local"]) == 75
    assert capsys.readouterr().out == "interrupted between two runs; the same command goes on\n"


@pytest.mark.training
def test_a_sweep_on_this_machine_is_interrupted_killed_and_continued(tmp_path):
    steps = 60
    more = {"save.every_minutes": 1e-6, "length.steps": steps, "data.workers": 2, "data.size": 16}
    sweep = Sweeping(tmp_path, {"a": {}}, **more)

    def trained():
        """Every step that was trained, also those that a kill lost."""
        return sweep.steps("a", "timing.jsonl")

    def until(count):
        deadline = time.monotonic() + 100
        while len(trained()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with sweep.start("--executor", "local") as launcher:
        until(4)
        (child,) = psutil.Process(launcher.pid).children()
        child.suspend()  # the two commands below take as long as some steps
        assert sweep.states() == {"a": "running"}
        assert "another launcher is working" in sweep("--executor", "local", code=2)
        child.kill()
        child.wait()
        until(len(trained()) + 2)
        launcher.send_signal(signal.SIGINT)
        said, _ = launcher.communicate(timeout=100)
        assert launcher.returncode == 75, said
    assert "the same command resumes it" in said
    assert sweep.states() == {"a": "stopped"}
    before = trained()
    assert before[-1] == max(sweep.steps("a")) < steps
    assert "1 finished" in sweep("--executor", "local")
    assert sweep.steps("a") == [*range(1, steps + 1)]
    assert trained() == [*before, *range(before[-1] + 1, steps + 1)], "a signal saves"


@pytest.mark.training
def test_a_sweep_whose_launcher_was_killed_saves_and_is_continued(tmp_path):
    settings = {"data.workers": 2, "length.steps": 100, "data.size": 16}
    sweep = Sweeping(tmp_path, {"a": {}}, **settings)
    arguments = ("--executor", "local", "--processes-per-node", "2")
    with sweep.start(*arguments) as launcher:
        deadline = time.monotonic() + 100
        while len(sweep.steps("a")) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
    assert "1 finished" in sweep(*arguments), "and does not complain of the processes that leave"
    assert psutil.wait_procs(family, timeout=1)[1] == []
    log = (tmp_path / "runs" / "study" / "local" / "a-seed0_0.log").read_text()
    assert "stopped by the end of its launcher" in log
    assert "resuming after step" in log
    assert sweep.steps("a") == [*range(1, 101)]
