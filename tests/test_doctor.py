"""`dml doctor`: each line is ok or says what to do, on a machine that has little, too."""

import json
import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from fleet import ROOT, environment

from dml.cli import doctor
from dml.cli.doctor import BROKEN, OK, OPTIONAL, WARNING, Finding
from dml.cli.network import Link, measure

NETWORK = ROOT / "dml" / "cli" / "network.py"


def run(python, *words, **variables):
    return subprocess.run(
        [python, "-m", "dml.cli", "doctor", *words],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_this_machine_can_train(tmp_path):
    ended = run(sys.executable, "--dir", str(tmp_path / "runs"))
    assert ended.returncode == 0, ended.stdout
    states = {line.split()[1]: line.split()[0] for line in ended.stdout.splitlines()}
    for name in ("python", "torch", "accelerate", "pillow", "cores", "free", "write"):
        assert states[name] in (OK, WARNING)
    assert "not tested: this is no Slurm job" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_json_has_the_same_findings(tmp_path):
    ended = run(sys.executable, "--json", "--dir", str(tmp_path))
    found = [Finding(**each) for each in json.loads(ended.stdout)]
    assert {"python", "torch", "slurm", "network"} <= {each.name for each in found}
    assert all(each.fix for each in found if each.state in (WARNING, BROKEN))


def test_without_torch_it_says_so(tmp_path):
    """In an environment that has no package at all."""
    venv.create(tmp_path / "bare", symlinks=True)
    ended = run(tmp_path / "bare" / "bin" / "python", "--dir", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr == ""
    assert "broken    torch            cannot be imported: ModuleNotFoundError" in ended.stdout
    assert "write speed" in ended.stdout, "it goes on"


@pytest.mark.parametrize(
    ("requirement", "extra", "state", "text"),
    [
        ("numpy>=1.26", None, OK, ""),
        ("numpy>=99.1", None, BROKEN, "is older than 99.1; pip install 'numpy>=99.1'"),
        ("numpy>=99.1", "timm", WARNING, "is older than 99.1; pip install 'numpy>=99.1'"),
        ("no-such-package", None, BROKEN, "not installed; pip install 'no-such-package'"),
        (
            "no-such-package>=1",
            "timm",
            OPTIONAL,
            "not installed, for timm; pip install 'no-such-package>=1'",
        ),
    ],
)
def test_packages(requirement, extra, state, text):
    found = doctor.package(requirement, extra)
    assert found.state == state
    assert text in str(found)


def test_versions_are_compared_as_numbers():
    assert doctor.numbers("2.13.0+cpu") == (2, 13, 0)
    assert doctor.numbers("0.1.0.dev0") == (0, 1, 0)
    assert doctor.numbers("unknown") == ()
    assert doctor.numbers("10.0") > doctor.numbers("9.5")


def test_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "raise ImportError('libcuda.so.1 is missing')")
    (broken,) = [each for each in doctor.devices() if each.state == BROKEN]
    assert "libcuda.so.1 is missing" in broken.text


@pytest.mark.parametrize(
    ("devices", "backends", "driver", "state", "text"),
    [
        ([["A100", 80 * 2**30]], ["gloo", "nccl"], True, OK, "GPU 0            A100, 80 GiB"),
        ([["A100", 80 * 2**30]], ["gloo"], True, BROKEN, "has no NCCL"),
        ([], ["gloo"], True, WARNING, "torch sees no GPU"),
        ([], ["gloo"], False, OPTIONAL, "none: training uses the cores"),
        ([], [], False, BROKEN, "has no gloo"),
    ],
)
def test_devices(devices, backends, driver, state, text, monkeypatch):
    said = json.dumps({"cuda": "12.8", "devices": devices, "backends": backends})
    monkeypatch.setattr(doctor, "PROBE", f"print({said!r})")
    monkeypatch.setattr(doctor, "is_installed", lambda program: driver)
    assert [each.state for each in doctor.devices() if text in str(each)] == [state]


def test_a_small_shared_memory_has_its_fix(small_disk, tmp_path):
    found = doctor.shared_memory(small_disk("64M"))
    assert found.state == WARNING
    assert "--shm-size=8g" in str(found)
    assert doctor.shared_memory(tmp_path / "none").state == WARNING


def test_a_folder_that_cannot_be_written_is_broken():
    (found,) = doctor.disk(Path("/proc/nowhere/runs"))
    assert found.state == BROKEN
    assert "set run.dir" in str(found)


def test_a_full_disk_is_broken(small_disk):
    (found,) = doctor.disk(small_disk("1M") / "runs")
    assert found.state == BROKEN
    assert "No space left" in found.text


@pytest.mark.parametrize("name", doctor.INTERFACES)
def test_an_interface_that_does_not_exist(name, monkeypatch):
    monkeypatch.setenv(name, "lo")
    assert [each.state for each in doctor.interfaces()] == [OK]
    monkeypatch.setenv(name, "ib9")
    (found,) = doctor.interfaces()
    assert found.state == BROKEN
    assert "unset it, or name one of" in str(found)


# ---- the network ------------------------------------------------------------------------------------


def test_a_link_is_measured():
    with subprocess.Popen([sys.executable, NETWORK], stdout=subprocess.PIPE, text=True) as server:
        name, port = server.stdout.readline().split()
        assert name
        link = measure("localhost", int(port))
    assert 0 < link.seconds < 1
    assert link.bits_per_second > 1e7
    assert server.returncode == 0


def test_a_node_that_cannot_be_reached_is_broken():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        found = doctor.visit("localhost", unused.getsockname()[1])
    assert found.state == BROKEN
    assert "open the ports between nodes" in str(found)
    assert doctor.visit("no-such-host.invalid", 9).state == BROKEN
    assert "srun started nothing there" in doctor.visit("localhost", 0).text


def test_a_slow_link_has_its_fix(monkeypatch):
    monkeypatch.setattr(doctor, "measure", lambda *_: Link(0.001, 1e8))
    found = doctor.visit("n2", 9)
    assert found.state == WARNING
    assert "1.00 ms round trip, 0.1 Gbit/s" in found.text


SRUN = """#!/bin/bash
[ "${*:1:7}" = "--overlap --nodes 2 --ntasks 2 --ntasks-per-node 1" ] || exit 9
SLURMD_NODENAME=localhost "${@:8}" &
wait
"""


def test_every_node_of_a_job_is_visited(tmp_path, monkeypatch):
    """Two nodes, of which one does not start."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost n2\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "WAIT_SECONDS", 3)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost,n2")
    here, there = doctor.network()
    assert here.state in (OK, WARNING)
    assert here.name == "to localhost"
    assert there == Finding(
        "to n2", BROKEN, "srun started nothing there", "look at the node in sinfo"
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    assert [each.text for each in doctor.network()] == ["the job has one node"]
