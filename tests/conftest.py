"""Which tests start processes, train, or need Slurm; and how they share a machine.

`make test-fast` leaves out every test with one of the markers below. They cannot be forgotten: a test
that starts such a process without the marker fails.
"""

import gc
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from forks import Forked
from hypothesis import settings

# Threads that wait for work must not spin: with more threads than cores, small networks became ten
# times slower. Both settings are read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of tests are in memory, where there is room: a run syncs what it writes, and the tests of resuming took
# twice as long on a disk.
MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"], tempfile.tempdir = str(MEMORY), None

gc.set_threshold(10_000)  # as in quick/sitecustomize.py
settings.register_profile("tests", deadline=None)  # a busy machine is no failure
settings.load_profile("tests")

# No doctests: two modules of one name, and a device that must not be registered in this process.
collect_ignore = ["conftest.py", "cluster/conftest.py", "fakegpu.py", "quick", "workers"]
MARKERS = ("slurm", "training", "processes")
# The files that take longest, ten seconds or more of the clock, begin first: one that begins last would run
# alone at the end. Of the first ones, Slurm's and the campaign of faults mostly wait: not at the same time.
LONGEST = (
    "test_cluster.py",
    "test_docs.py",
    "test_train_resume.py",
    "test_triton.py",
    "test_chaos.py",
    "test_benchmarks.py",
    "test_hostile.py",
    "test_slurm.py",
    "test_train_processes.py",
    "test_train_towers.py",
    "test_train_proxies.py",
    "test_gpu_check.py",
    "test_models.py",
    "test_cli.py",
    "test_fakegpu.py",
    "test_endings.py",
    "test_global.py",
    "test_train_memory.py",
    "test_columns_processes.py",
    "test_train_remote.py",
    "test_damage.py",
    "test_streaming.py",
    "test_tune.py",
    "test_export.py",
    "test_shards_build.py",
    "test_search.py",
    "test_train.py",
    "test_step.py",
    "test_package.py",
    "test_progress.py",
    "test_processes.py",
    "test_columns.py",
    "test_gpu_step.py",
    "test_remote.py",
    "test_look_browser.py",
    "test_proxies.py",
    "test_architecture.py",
    "test_memory.py",
    "test_longer.py",
    "test_shards_fuzz.py",
    "test_look_serve.py",
)

popen, forked = subprocess.Popen.__init__, Forked.__init__


def needed_marker(command, env):
    """The marker that a test needs to start this command, or None."""
    command = [command] if isinstance(command, str | bytes) else command
    text = " ".join(os.fsdecode(word) for word in command)  # perhaps of a shell
    names = {os.path.basename(word) for word in text.split()}
    if names & {"--help", "-h", "--dry-run", "--status", "make"}:
        return None
    if names & {"slurmctld", "slurmd", "sbatch"}:
        return "slurm"
    if "train.py" in names or (names & {"dml", "dml.cli"} and names & {"train", "demo"}):
        return "training"
    if names & {"accelerate", "torch.distributed.run", "torchrun"} or "RANK" in (env or {}):
        return "processes"
    return None


def pytest_configure(config):
    def check(command, env):
        marker = needed_marker(command, env)
        test = config.stash.get(CURRENT, None)
        if marker and test and not any(test.get_closest_marker(name) for name in MARKERS):
            pytest.fail(
                f"{test.nodeid} starts {command}: give it @pytest.mark.{marker}, so that "
                "`make test-fast` leaves it out",
                pytrace=False,
            )

    def checked_popen(self, args, *more, **options):
        check(args, options.get("env"))
        popen(self, args, *more, **options)

    def checked_fork(self, command, cwd, env, *outputs):
        check([*map(str, command)], env)
        forked(self, command, cwd, env, *outputs)

    subprocess.Popen.__init__, Forked.__init__ = checked_popen, checked_fork


def pytest_unconfigure():
    subprocess.Popen.__init__, Forked.__init__ = popen, forked


CURRENT = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.config.stash[CURRENT] = item


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    item.config.stash[CURRENT] = None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slurm" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")
    items.sort(key=lambda item: LONGEST.index(name) if (name := item.path.name) in LONGEST else 99)


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps one state per process; afterwards it is as before the first Accelerator.
    The number of threads, too."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(place)
        return place

    mounted = []
    yield mount
    if mounted:
        subprocess.run(["umount", str(place)], check=True)
