"""Starts the processes of a training on this machine, passes signals on, and says how they ended.

The first process writes to the terminal as if it were alone. What the others write is kept in their
account, a file without a name, and shown only if one of them is the reason that the training failed.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO

from dml.distributed.signals import ONE_PRESS, SIGNALS
from dml.train import CRASHED, DIVERGED, FINISHED, INTERRUPTED, MISTAKE
from launch.processes import Process, end, free_port, send, start_rank, wait
from shards.output import STOPPED, program_name

RANK = Path(__file__).with_name("rank.py")
LONGEST_ACCOUNT = 2**16  # bytes that are read, from the end
TRACEBACK = "Traceback (most recent call last)"
TOGETHER = (FINISHED, MISTAKE, DIVERGED, INTERRUPTED)  # codes with which all processes end alike


class Signals:
    """Passes the first signal on to all processes. A Ctrl-C more than a second later kills them."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.first: int | None = None
        self.when = 0.0
        self.killed = False

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self.when = number, time.monotonic()
            send(self.processes, number)
        elif number == signal.SIGINT and time.monotonic() - self.when > ONE_PRESS:
            self.killed = True
            send(self.processes, signal.SIGKILL)


def launch(argv: Sequence[str], processes: int, variables: Mapping[str, str]) -> int:
    """Train with so many processes; returns the exit code. argv: of dml/train.py."""
    signals = Signals()
    for number in SIGNALS:
        signal.signal(number, signals.pass_on)
    with ExitStack() as files:
        accounts = [files.enter_context(TemporaryFile()) for _ in range(processes)]
        try:
            # Signals wait until all processes are there, and in each until it is ready (rank.py):
            # Python would print a traceback if Ctrl-C reached it while it starts.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            start(argv, variables, accounts, signals.processes)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            order = wait(signals.processes, pause=0.05)
        finally:
            end(signals.processes)
        codes = {rank: signals.processes[rank].returncode for rank in order}
        texts = [read(account) for account in accounts]
    killed = (STOPPED, "ended by a second Ctrl-C; the same command resumes")
    code, text = killed if signals.killed else conclude(codes, texts, signals.first)
    if text:
        print(f"{program_name('dml train')}: {text}", file=sys.stderr, flush=True)
    return code


def start(
    argv: Sequence[str],
    variables: Mapping[str, str],
    accounts: Sequence[IO[bytes]],
    started: list[Process],
) -> None:
    """Start a process per account; each is added to `started` at once."""
    port = free_port()
    for rank, account in enumerate(accounts):
        number = account.fileno()
        command = [sys.executable, str(RANK), str(number), *argv]
        output = {"stdout": account, "stderr": account} if rank else {}
        process = start_rank(
            command, rank, len(accounts), port, variables, pass_fds=[number], **output
        )
        started.append(process)


def read(account: IO[bytes]) -> str:
    account.seek(max(0, account.seek(0, os.SEEK_END) - LONGEST_ACCOUNT))
    return account.read().decode("utf-8", "replace").strip()


def conclude(
    codes: Mapping[int, int], accounts: Sequence[str], asked: int | None
) -> tuple[int, str | None]:
    """The exit code of the training, and what is left to say.

    codes: by rank, in the order in which the processes ended; one that had to be killed is missing.
    accounts: by rank. asked: the signal that was passed on.
    """
    if len(codes) == len(accounts) and len(set(codes.values())) == 1 and codes[0] in TOGETHER:
        return codes[0], None  # the first process has said it
    if asked is not None and -asked in codes.values():
        name = signal.Signals(asked).name
        return (
            INTERRUPTED,
            f"stopped by {name} before the first step; the same command starts again",
        )
    order = list(codes)
    failed = [rank for rank in order if codes[rank] not in (FINISHED, INTERRUPTED)]
    if not failed:
        return max(codes.values()), None  # some had finished when the signal came
    rank = min(failed, key=lambda r: (lost_the_others(accounts[r]), order.index(r)))
    code = codes[rank] if codes[rank] in (MISTAKE, DIVERGED) else CRASHED
    return code, explain(rank, codes[rank], accounts[rank])


def lost_the_others(account: str) -> bool:
    """Whether a process failed only because another one had ended."""
    return "connection" in account.rpartition("\n")[2].lower()


def explain(rank: int, code: int, account: str) -> str | None:
    own = f"{program_name('dml train')}: "
    sentences = [line.removeprefix(own) for line in account.splitlines() if line.startswith(own)]
    if sentences:
        return f"process {rank}: {sentences[-1]}"
    if TRACEBACK in account:
        return f"process {rank} failed:\n{account[account.index(TRACEBACK) :]}"
    if code < 0:
        name = signal.Signals(-code).name
        why = ", most often because the machine's memory is full" if -code == signal.SIGKILL else ""
        return f"process {rank} was ended by {name}{why}; the same command resumes"
    if rank == 0:
        return None  # it has said it
    return f"process {rank} ended with code {code}\n{account}"
