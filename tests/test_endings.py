"""Whatever happens to a process of a run, all of them end soon, and none of their children is left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from fleet import ROOT, WORKERS, environment, ranks
from runs import BASE, ICONS, TRAIN, Launched, checkpoints, content, train

from dml.errors import memory_sentence

SOON = 10  # seconds
TWO_WORKERS = ("data.workers=2", "save.every_minutes=0.001")

pytestmark = pytest.mark.training


class Watched(Launched):
    """A run with loader workers, and the processes that it had."""

    def __init__(self, how, folder, *sets, **more):
        super().__init__(how, folder, *TWO_WORKERS, *sets, **more)

    def family(self):
        """All processes of the run, from the top."""
        tops = [psutil.Process(p.pid) for p in self.processes if p.poll() is None]
        return [each for top in tops for each in (top, *top.children(recursive=True))]

    def workers(self, rank=0):
        return self.rank(rank).children()

    def end_soon(self, family, start):
        """The exit codes. All of the family must end soon after `start`."""
        codes = self.end(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=SOON)
        for each in alive:
            each.kill()
        assert not alive, f"{alive} outlived the run: {self.said}"
        assert time.monotonic() - start < SOON, self.said
        return codes


def crashed(how, folder, rank, error):
    return Watched(how, folder, program=(WORKERS / "crashing.py", rank, error))


def seconds_before(run, text):
    """The processes of the run while it trains, and the time when it says `text`."""
    family = run.until(2).family()
    deadline = time.monotonic() + 100
    while text not in run.said:
        assert time.monotonic() < deadline, run.said
        time.sleep(0.01)
    return family, time.monotonic()


# ---- an error that nobody foresaw ------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1), (2, 0)])
def test_an_unexpected_error_ends_all_processes_with_its_traceback(processes, rank, tmp_path):
    run = crashed(processes, tmp_path, rank, "RuntimeError")
    family, start = seconds_before(run, "nobody foresaw this")
    codes = run.end_soon(family, start)
    assert codes[rank] == 1
    assert 0 not in codes
    assert "Traceback" in run.said


FULL = {
    "MemoryError": "the machine's memory is full (MemoryError: ); set engine.micro_batch or "
    "data.workers to less",
    "OutOfMemoryError": "the memory of the GPU is full (OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2 GiB); set engine.micro_batch to less",
}


@pytest.mark.parametrize("error", FULL)
def test_too_little_memory_is_a_sentence_on_the_process_that_met_it(error, tmp_path):
    run = crashed(2, tmp_path, 1, error)
    family, start = seconds_before(run, "memory")
    codes = run.end_soon(family, start)
    assert codes[1] == 1
    assert codes[0] != 0
    assert f"dml/train.py: {FULL[error]}" in run.said


def test_real_errors_of_too_little_memory_have_a_sentence():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    assert "the machine's memory is full" in memory_sentence(caught.value)
    with pytest.raises(MemoryError) as caught:
        bytearray(2**62)
    assert "the machine's memory is full" in memory_sentence(caught.value)
    assert memory_sentence(RuntimeError("something else")) is None
    assert memory_sentence(ValueError("memory")) is None


def test_a_full_shared_memory_is_a_sentence(tmp_path):
    """In a mount namespace of its own, where /dev/shm holds one MiB. The run's folder, which may be there, is
    /mnt."""
    small = 'mount --bind "$0" /mnt && mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", small, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace needs root")
    sets = ["batch.classes=100", "data.size=64", *TWO_WORKERS]
    config = ["--config", ROOT / "configs" / "icons_mini.yaml", "--set", "run.dir=/mnt"]
    ended = subprocess.run(
        [*command, sys.executable, *map(str, [TRAIN, *config, *sets])],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "dml/train.py: /dev/shm is full" in ended.stderr
    assert "data.workers" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_plain_program_with_workers_ends_after_an_error(tmp_path):
    """One that uses the loader in its own loop, and Python's own way to end."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import numpy as np
from dml.data.batches import EvalBatches
from dml.data.loader import loader
from dml.data.preprocessing import Input
from shards.index import load_index
index = load_index({str(ICONS)!r})
rows = np.arange(1000)
batches = EvalBatches(index, rows, rows, Input(size=16), 10, 0, 1)
coming = loader(batches, range(100), 2)
next(coming)
raise RuntimeError("nobody foresaw this")
"""
    )
    ended = subprocess.run(
        [sys.executable, program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "nobody foresaw this" in ended.stderr


# ---- killed ---------------------------------------------------------------------------------------


def test_a_killed_worker_ends_the_run_with_a_sentence(tmp_path):
    run = Watched(1, tmp_path, "length.steps=1000").until(2)
    family, start = run.family(), time.monotonic()
    run.workers()[0].kill()
    assert run.end_soon(family, start) == [1]
    assert "dml/train.py: a loader's worker was killed" in run.said
    assert "set data.workers to less" in run.said


def test_a_killed_process_ends_the_others_without_a_launcher(tmp_path):
    run = Watched(2, tmp_path, "length.steps=1000").until(2)
    family, start = run.family(), time.monotonic()
    run.rank(0).kill()
    first, second = run.end_soon(family, start)
    assert first == -signal.SIGKILL
    assert second == 1
    assert "Traceback" in run.said


def test_the_same_command_at_once_after_a_kill_is_not_refused(tmp_path):
    """The workers of the killed process do not hold its lock."""
    run = Watched(1, tmp_path).until(5)
    family = run.family()
    for worker in run.workers():
        worker.suspend()  # these cannot end with their parent
    run.processes[0].kill()
    run.end()
    again = Watched(1, tmp_path)
    try:
        assert again.end() == [0], again.said
    finally:
        for each in family[1:]:
            each.kill()


def test_processes_without_their_launcher_save_and_leave(tmp_path):
    run = Watched(["--num_processes", "2", "--multi_gpu"], tmp_path, "save.every_minutes=60")
    run.until(5)
    family, start = run.family(), time.monotonic()
    run.processes[0].kill()
    run.end_soon(family, start)
    assert "stopped by the end of its launcher after step" in run.said
    assert "the same command resumes" in run.said
    assert len(checkpoints(run.run)) == 1
    again = Watched(2, tmp_path)  # tests/test_train_resume.py has one that accelerate resumes
    assert again.end() == [0, 0], again.said
    assert content(again.run) == content(train(2, tmp_path / "whole"))


def test_a_process_that_waits_for_the_others_ends_with_its_launcher(tmp_path):
    """The first of two, and the second one never comes."""
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, TRAIN, *BASE, f"run.dir={tmp_path}"]
    first, _ = ranks(2)
    with subprocess.Popen(
        [sys.executable, "-c", launcher, *map(str, command)], env=environment(**first), cwd=ROOT
    ) as launched:
        top, deadline = psutil.Process(launched.pid), time.monotonic() + 100

        def waits(process):
            """Whether it listens for the other one."""
            ports = {each.laddr.port for each in process.net_connections() if each.laddr}
            return int(first["MASTER_PORT"]) in ports

        while not any(map(waits, top.children())):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (waiting,) = top.children()
        time.sleep(0.5)  # it listens, and then waits
        launched.kill()
    assert psutil.wait_procs([waiting], timeout=SOON)[1] == []


# ---- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_in_a_terminal_saves_once(tmp_path):
    """It reaches the launcher and the processes, to which the launcher then sends it again."""
    run = Watched(["--num_processes", "2", "--multi_gpu"], tmp_path, "save.every_minutes=60")
    run.until(5)
    family, start = run.family(), time.monotonic()
    os.killpg(run.processes[0].pid, signal.SIGINT)
    run.end_soon(family, start)
    assert "stopped by SIGINT after step" in run.said
    assert len(checkpoints(run.run)) == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    program = (WORKERS / "slow_saving.py",)
    run = Watched(1, tmp_path, "save.every_minutes=60", "length.steps=1000", program=program)
    run.until(5).processes[0].send_signal(signal.SIGINT)
    run.wait_for(lambda: "saving" in run.said, "the checkpoint")
    family, start = run.family(), time.monotonic()
    time.sleep(1.1)
    run.processes[0].send_signal(signal.SIGINT)
    assert run.end_soon(family, start) == [-signal.SIGINT]
    assert checkpoints(run.run) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_before_there_is_anything_to_save_ends_the_program(sent, tmp_path):
    run = Launched(1, tmp_path, forked=False)
    time.sleep(0.7)
    run.processes[0].send_signal(sent)
    assert run.end(timeout=SOON) in ([-sent], [75]), run.said
    assert "Traceback" not in run.said
