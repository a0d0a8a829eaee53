"""Trials on a real Slurm of two nodes: its daemons and a rank are killed."""

import signal
import subprocess
import time

import pytest
from cluster.test_cluster import OnSlurm, wait_for
from cluster.two_nodes import TwoNodes

from chaos.faults import Moment, steps
from chaos.judge import IDENTICAL, Violation, is_identical
from chaos.kinds import kind
from chaos.lab import Trial
from chaos.setups import SETTINGS, TWO

CONTROLLER, FIRST_NODE, SECOND_NODE = 1, 2, 3  # in TwoNodes.daemons, after munged


def restart(cluster: TwoNodes, which: int) -> None:
    """kill -9 of a daemon, and the same daemon again some seconds later."""
    old = cluster.daemons[which]
    old.kill()
    old.wait()
    time.sleep(3)
    log = (cluster.folder / f"again.{which}.out").open("a")
    with log:
        cluster.daemons[which] = subprocess.Popen(
            old.args,
            env=cluster.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


@kind("slurm", "kill -9 of a rank, a node's daemon or the controller of Slurm", per_round=0.34)
def slurm(t: Trial) -> str:
    t.setup_name = "two nodes of Slurm"
    cluster = t.lab.cluster
    victim = t.rng.choice(["rank 0", "rank 1", "controller", "first node", "second node"])
    moment = Moment.draw(t.rng, 0)
    t.note(f"{victim} at {moment}")
    settings = {**SETTINGS, "save.every_minutes": 0.02}
    sweep = OnSlurm(cluster, t.folder / "sweep", {"a": {}}, **settings)
    try:
        sweep("--nodes", "2", "--processes-per-node", "1")
        wait_for(lambda: steps(sweep.runs["a"]) >= moment.step, every=0.02, told=sweep.log())
        time.sleep(moment.seconds)
        if victim.startswith("rank"):
            rank = sweep.process("a", rank=int(victim[-1]))
            if rank is not None:
                rank.send_signal(signal.SIGKILL)
        elif victim == "controller":
            restart(cluster, CONTROLLER)
        else:
            restart(cluster, FIRST_NODE if victim == "first node" else SECOND_NODE)
        sweep.until("finished")
        wait_for(lambda: not cluster("squeue", "-h"), 30, told="to empty the queue")
    except (AssertionError, pytest.fail.Exception) as error:
        cluster("scancel", "--user=root")
        raise Violation(f"{error}") from None
    left = [rank for rank in (0, 1) if sweep.process("a", rank) is not None]
    if left:
        raise Violation(f"processes are left: ranks {left}")
    is_identical(sweep.runs["a"], t.expected(TWO))
    return IDENTICAL
