"""However a run is launched, its processes know each other, or it ends with a sentence."""

import subprocess
import sys

import pytest
from fleet import environment, free_port, launch
from runs import BASE, TRAIN

pytestmark = pytest.mark.processes

WHO = """
import torch
from network import leave
from dml.distributed.processes import became_one, make_accelerator
a = make_accelerator()
print(f"who {a.process_index} of {a.num_processes}, {a.distributed_type.value}, "
      f"{torch.get_num_threads()} threads, became one: {became_one()}")
leave(a)
"""


@pytest.fixture
def who(tmp_path):
    script = tmp_path / "who.py"
    script.write_text(WHO)
    return script


@pytest.mark.parametrize("how", [(), ("--num_processes", 1)])
def test_plain_launch_is_one_process(how, who):
    done = launch(*how, who)
    assert done.returncode == 0, done.stderr
    assert "who 0 of 1, NO," in done.stdout
    assert "became one: False" in done.stdout


def test_two_processes_know_each_other(who):
    done = launch("--multi_gpu", "--num_processes", 2, who)
    assert done.returncode == 0, done.stderr
    assert "who 0 of 2, MULTI_CPU," in done.stdout
    assert "who 1 of 2, MULTI_CPU," in done.stdout
    assert done.stdout.count("became one: False") == 2


def test_torchrun_works_too(who):
    ranks = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, str(who)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "who 1 of 2" in done.stdout


def test_processes_that_do_not_know_each_other_are_refused(who):
    """A script that makes a plain Accelerator first has formed accelerate's state, with one process."""
    who.write_text("from accelerate import Accelerator\nAccelerator()\n" + WHO)
    done = launch("--multi_gpu", "--num_processes", 2, who)
    assert done.returncode != 0
    assert "2 processes were launched but accelerate formed a group of 1" in done.stderr
    assert "who" not in done.stdout


def test_deepspeed_that_accelerate_drops_is_refused(who):
    config = "configs/accelerate/zero2.yaml"
    more = {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    done = launch("--config_file", config, "--num_processes", 2, who, **more)
    assert done.returncode != 0
    assert "DeepSpeed was asked for but accelerate dropped it" in done.stderr


def test_several_processes_that_became_one_are_noticed(tmp_path):
    """accelerate starts one process without a warning where there is no GPU. The launches above are
    not taken for it."""
    sets = [f"run.dir={tmp_path}", "engine.kind=triton"]  # refused after the processes have met
    done = launch("--num_processes", 2, TRAIN, *BASE, *sets)
    assert "accelerate was asked for several processes but started one" in done.stdout
