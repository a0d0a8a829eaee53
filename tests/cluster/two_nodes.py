"""A real Slurm of two nodes, n1 and n2, on the loopback of this machine.

    python tests/cluster/two_nodes.py FOLDER        as root, until Ctrl-C or SIGTERM
    export SLURM_CONF=FOLDER/slurm.conf             for sbatch, squeue, launch/slurm.py

No systemd, no cgroups, no database. All daemons are children of this process and end with it.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")

# cred_expire is also the hold-off after a requeue, two minutes by default. Without
# preempt_send_user_signal a preempted job gets SIGTERM alone, never the signal it asked for. The port
# of a job is drawn from its number: the numbers of two clusters on one machine must differ.
SETTINGS = """
ClusterName=dml
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
FirstJobId={first_job}
KillWait=15
MinJobAge=60
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=16 RealMemory=64000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=16 RealMemory=64000 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
"""


def missing() -> str | None:
    """Why there can be no cluster here, in a sentence."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "Slurm's daemons need root on Linux"
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"no {', '.join(programs)} here; apt-get install --no-install-recommends {PACKAGES}"
    return None


class TwoNodes:
    """As a context: the cluster is up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder.resolve(), []
        self.settings = self.folder / "slurm.conf"

    def __enter__(self):
        self.configure()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def configure(self) -> None:
        for name in ("state", "devices", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
        for gpu in range(8):  # twins of /dev/null: enough for scheduling
            device = self.folder / "devices" / f"gpu{gpu}"
            if not device.exists():
                os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-2] Name=gpu File={self.folder}/devices/gpu[0-7]\n"
        )
        hosts = "".join(f"127.0.0.1 {node}\n" for node in NODES)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        numbers = dict(zip(("control", *NODES), free_ports(3), strict=True))
        host = socket.gethostname().split(".")[0]
        numbers["first_job"] = random.SystemRandom().randrange(1, 1_000_000)
        self.settings.write_text(SETTINGS.format(folder=self.folder, host=host, **numbers))

    def start(self) -> None:
        folder, conf = self.folder, str(self.settings)
        self.daemon(
            "munged",
            *("--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log"),
        )
        self.wait(lambda: (folder / "munge.socket").exists())
        self.daemon("slurmctld", "-D", "-f", conf)
        for node in NODES:
            # Its own host name and hosts file: n1 and n2 resolve there, as MASTER_ADDR must.
            self.daemon(
                *("unshare", "--mount", "--uts", "--propagation", "slave", "sh", "-c"),
                f"mount --bind {folder}/hosts /etc/hosts && hostname {node} && "
                f"exec slurmd -D -f {conf} -N {node}",
                log=f"slurmd.{node}",
            )
        self.wait(lambda: self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())

    def daemon(self, *command: str, log: str = "") -> None:
        """Start it, to end when this process ends, however that may be."""
        with (self.folder / f"{log or command[0]}.out").open("a") as out:
            self.daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", *command],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def wait(self, ready, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            ended = [" ".join(p.args) for p in self.daemons if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                said = {p.name: p.read_text()[-600:] for p in self.folder.glob("*.out")}
                raise RuntimeError(f"Slurm did not come up; ended: {ended}; they said {said}")
            time.sleep(0.1)

    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not re.match("SLURM_|SBATCH_|SRUN_", k)}
        return {**inherited, "SLURM_CONF": str(self.settings)}

    def __call__(self, *command: str) -> str:
        """The output of squeue and the like, empty when it fails."""
        return subprocess.run(
            command,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=30,
            check=False,
        ).stdout

    def stop(self) -> None:
        """Cancel all jobs, and end the daemons; each is known by its pid."""
        self("scancel", "--user=root")
        deadline = time.monotonic() + 15
        while self("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(self.daemons):
            process.terminate()
        for process in self.daemons:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemons.clear()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def main(folder: str) -> int:
    problem = missing()
    if problem:
        print(f"two_nodes.py: {problem}", file=sys.stderr)
        return 2
    signals = {signal.SIGINT, signal.SIGTERM}
    with TwoNodes(Path(folder)) as cluster:
        print(f"export SLURM_CONF={cluster.settings}", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
