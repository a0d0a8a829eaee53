"""Check this machine for training: versions, devices, shared memory, disk, Slurm, network.

Every line is ok, optional (fine without it), or says what is wrong and how to fix it. In a Slurm job of
several nodes the network between them is measured. Needs no torch, and says so if there is none. Exit
codes: 0 training can start, 1 something that it needs is broken.
"""

import argparse
import json
import os
import platform
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from dml import __version__
from dml.cli.network import WAIT_SECONDS, measure
from launch.slurm_commands import SlurmError, is_installed, slurm
from shards.cores import available_cores
from shards.output import program_name

OK, OPTIONAL, WARNING, BROKEN = "ok", "optional", "warning", "broken"
FOR_DEVELOPERS = ("test", "dev", "bench")  # extras that training never needs
GIB = 2**30
ENOUGH_SHM, ENOUGH_DISK = GIB, 5 * GIB  # bytes
SAMPLE = 2**26  # bytes that are written to measure the disk
SLOW_DISK, SLOW_NETWORK = 20e6, 1e9  # bytes per second; bits per second
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# A process of its own: a broken torch may end it.
PROBE = """
import json, torch, torch.distributed as dist
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "cuda": torch.version.cuda,
    "devices": [[each.name, each.total_memory] for each in devices],
    "backends": [n for n in ("gloo", "nccl") if getattr(dist, f"is_{n}_available")()],
}))
"""
NETWORK = Path(__file__).with_name("network.py")


@dataclass(frozen=True)
class Finding:
    name: str
    state: str
    text: str
    fix: str | None = None

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.state:<9} {self.name:<16} {self.text}{fix}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("dml doctor"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", default="runs", help="where runs are written (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON, for a bug report")
    arguments = parser.parse_args(argv)
    findings = []
    for finding in examine(Path(arguments.dir)):
        findings.append(finding)
        if not arguments.json:
            print(finding, flush=True)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return int(any(finding.state == BROKEN for finding in findings))


def examine(folder: Path) -> Iterator[Finding]:
    yield python()
    yield from packages()
    yield from devices()
    yield shared_memory(Path("/dev/shm"))
    yield compiler()
    yield from disk(folder)
    yield slurm_version()
    yield from interfaces()
    yield from network()


# ---- versions --------------------------------------------------------------------------------------


def python() -> Finding:
    text = f"{platform.python_version()}, {sys.executable}, {platform.platform()}"
    return Finding("python", OK, text)


def numbers(version: str) -> tuple[int, ...]:
    """The version up to its first part that is no number: 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0])))


def packages() -> Iterator[Finding]:
    try:
        wanted = metadata.requires("dml") or []
    except metadata.PackageNotFoundError:
        fix = "pip install . in its folder; the versions of packages were not checked"
        yield Finding("dml", WARNING, f"{__version__}, not installed", fix)
        return
    yield Finding("dml", OK, f"{__version__}, {Path(__file__).parents[1]}")
    for text in wanted:
        requirement, _, condition = text.partition(";")
        extra = re.search(r"extra == ['\"](\w+)['\"]", condition)
        if not extra or extra[1] not in FOR_DEVELOPERS:
            yield package(requirement.strip(), extra[1] if extra else None)


def package(requirement: str, extra: str | None) -> Finding:
    """requirement: such as torch>=2.13. extra: what it is for, if training does not need it."""
    name, _, least = (part.strip() for part in requirement.partition(">="))
    install = f"pip install '{requirement}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        text = f"not installed, for {extra}" if extra else "not installed"
        return Finding(name, OPTIONAL if extra else BROKEN, text, install)
    if least and numbers(version) < numbers(least):
        text = f"{version} is older than {least}"
        return Finding(name, WARNING if extra else BROKEN, text, install)
    return Finding(name, OK, version)


# ---- the machine -----------------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    yield Finding("cores", OK, f"{available_cores()}")
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        why = (probe.stderr.strip() or f"exit code {probe.returncode}").splitlines()[-1]
        fix = "install torch again, as pytorch.org says for this machine"
        yield Finding("torch", BROKEN, f"cannot be imported: {why}", fix)
        return
    found = json.loads(probe.stdout)
    if "gloo" not in found["backends"]:
        fix = "install torch with torch.distributed"
        yield Finding("torch", BROKEN, "has no gloo, which processes on CPUs use", fix)
    for number, (name, memory) in enumerate(found["devices"]):
        yield Finding(f"GPU {number}", OK, f"{name}, {memory / GIB:.0f} GiB")
    if found["devices"] and "nccl" not in found["backends"]:
        yield Finding("torch", BROKEN, "has no NCCL, which GPUs use", "install torch for CUDA")
    elif not found["devices"] and is_installed("nvidia-smi"):
        text = f"torch sees no GPU, but there is an nvidia-smi (torch's CUDA: {found['cuda']})"
        fix = "install torch for the CUDA of the driver, or check CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", WARNING, text, fix)
    elif not found["devices"]:
        yield Finding("GPU", OPTIONAL, "none: training uses the cores")


def shared_memory(folder: Path) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding(str(folder), WARNING, f"{error.strerror}", "set data.workers=0")
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free, for the loader's workers"
    if usage.free < ENOUGH_SHM:
        fix = "docker run --shm-size=8g, or set data.workers to less"
        return Finding(str(folder), WARNING, text, fix)
    return Finding(str(folder), OK, text)


def compiler() -> Finding:
    command = os.environ.get("CXX", "c++")
    if not is_installed(command):
        fix = "install g++ for DeepSpeed and Triton"
        return Finding("compiler", OPTIONAL, f"there is no {command}", fix)
    return Finding("compiler", OK, f"{shutil.which(command)}")


def disk(folder: Path) -> Iterator[Finding]:
    """Free space and speed where runs are written; nothing stays behind."""
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.isdir(each))
    try:
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            data, start = os.urandom(2**20), time.perf_counter()
            for _ in range(SAMPLE // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = SAMPLE / (time.perf_counter() - start)
    except OSError as error:
        fix = "set run.dir to a folder with space that can be written"
        yield Finding("run folder", BROKEN, f"{there} cannot be written: {error.strerror}", fix)
        return
    text = f"{free / GIB:,.0f} GiB free in {there}"
    little = free < ENOUGH_DISK
    fix = "free some space: a checkpoint holds three times the weights, and two are kept"
    yield Finding("free disk", WARNING if little else OK, text, fix if little else None)
    slow = speed < SLOW_DISK
    fix = "set run.dir to a faster disk, or save.every_minutes to more"
    yield Finding(
        "write speed", WARNING if slow else OK, f"{speed / 1e6:,.0f} MB/s", fix if slow else None
    )


# ---- several machines ------------------------------------------------------------------------------


def slurm_version() -> Finding:
    if not is_installed("sbatch"):
        return Finding("slurm", OPTIONAL, "no sbatch here: sweeps run with --executor local")
    try:
        return Finding("slurm", OK, slurm("sinfo", "--version").strip())
    except SlurmError as error:
        return Finding(
            "slurm", WARNING, str(error).splitlines()[0], "ask the cluster's administrators"
        )


def interfaces() -> Iterator[Finding]:
    """The variables that tell gloo and NCCL which network to use."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        if variable in os.environ:
            # NCCL: a list of prefixes, exact after "=", excluded after "^"
            names = os.environ[variable].lstrip("^=").split(",")
            wrong = [name for name in names if not any(n.startswith(name) for n in there)]
            fix = f"unset it, or name one of {', '.join(there)}"
            text = f"{os.environ[variable]}" + (": there is no such interface" if wrong else "")
            yield Finding(variable, BROKEN if wrong else OK, text, fix if wrong else None)


def network() -> Iterator[Finding]:
    """Every node of this job, reached from here."""
    if "SLURM_JOB_ID" not in os.environ:
        text = "not tested: this is no Slurm job; sbatch --nodes 2 --wrap 'dml doctor' tests it"
        yield Finding("network", OPTIONAL, text)
        return
    try:
        names = slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    except (SlurmError, KeyError) as error:
        yield Finding("network", BROKEN, f"the nodes of the job are unknown: {error}", "ask Slurm")
        return
    if len(names) == 1:
        yield Finding("network", OK, "the job has one node")
        return
    count = str(len(names))
    step = ["srun", "--overlap", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"]
    with subprocess.Popen([*step, sys.executable, str(NETWORK)], stdout=subprocess.PIPE) as servers:
        try:
            assert servers.stdout is not None
            ports = dict(map(str.split, read_lines(servers.stdout.fileno(), len(names))))
            for name in names:
                yield visit(name, int(ports.get(name, 0)))
        finally:
            servers.terminate()


def read_lines(pipe: int, count: int) -> list[str]:
    """So many lines, or fewer if the writers end or the time is over."""
    text, deadline = b"", time.monotonic() + WAIT_SECONDS
    while text.count(b"\n") < count:
        ready, _, _ = select.select([pipe], [], [], max(0, deadline - time.monotonic()))
        part = os.read(pipe, 4096) if ready else b""
        if not part:
            break
        text += part
    return text.decode().split("\n")[:-1]


def visit(name: str, port: int) -> Finding:
    """port: 0 if nothing was started there."""
    label = f"to {name}"
    if not port:
        return Finding(label, BROKEN, "srun started nothing there", "look at the node in sinfo")
    try:
        link = measure(name, port)
    except OSError as error:
        text = f"cannot be reached on port {port}: {error}"
        fix = f"open the ports between nodes, or set {' and '.join(INTERFACES)} to their network"
        return Finding(label, BROKEN, text, fix)
    text = f"{1e3 * link.seconds:.2f} ms round trip, {link.bits_per_second / 1e9:.1f} Gbit/s"
    if link.bits_per_second < SLOW_NETWORK:
        fix = f"set {' and '.join(INTERFACES)} to the fast network of the nodes"
        return Finding(label, WARNING, text, fix)
    return Finding(label, OK, text)
