"""Starts real programs and watches all processes that come of them, to the last one.

A process belongs to a trial if it inherited the trial's variable, or its session where the program was
forked from the campaign. So those are found, too, whose parent has died.
"""

import ctypes
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import forks
from fleet import ROOT, environment

from chaos.judge import SlowError, Violation, last_lines

TAG = "CHAOS_TRIAL"
CLONE_NEWNS = 0x20000  # of Linux: a mount namespace
PROMPT, HANG = 10, 60  # seconds in which a process should end, and at the latest must have ended
TRAIN = ROOT / "dml" / "train.py"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    command: tuple[str, ...]

    @property
    def program(self) -> str:
        """The script that Python runs."""
        return next((word for word in self.command[1:] if not word.startswith("-")), "")

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it may have ended meanwhile
            os.kill(self.pid, number)

    def waited(self) -> float:
        """Seconds that it was ready to run, but had no processor."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def descriptors(self) -> list[str]:
        """The files that it has open."""
        try:
            return [os.readlink(each) for each in Path(f"/proc/{self.pid}/fd").iterdir()]
        except OSError:
            return []


class Forked:
    """A child of this process, with as much of the interface of Popen as is needed."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self.seconds = 0.0  # of the processor, when it has ended

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.seconds = used.ru_utime + used.ru_stime
        return self.returncode


class Watched:
    """The programs of a trial, which write to one log."""

    def __init__(self, log: Path) -> None:
        self.log, self.children = log, []
        self.sessions: set[int] = set()
        log.touch()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def codes(self) -> list[int | None]:
        return [child.poll() for child in self.children]

    def start(self, words: Sequence[object], env: Mapping[str, str], cwd: Path = ROOT) -> None:
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [*map(str, words)],
                cwd=cwd,
                env=environment(**{**env, TAG: str(self.log)}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.children.append(child)

    def fork_anew(self, words: Sequence[object], env: Mapping[str, str]) -> None:
        """Run a script and its arguments in a process that looks as if `start` had started it, but that
        need not import torch."""
        env = environment(**{**env, TAG: str(self.log)})
        self.children.append(forks.Forked(words, ROOT, env, self.log, self.log))

    def fork(self, words: Sequence[object], gigabytes: float | None = None) -> None:
        """Run one of our programs as `__main__` in a fork of this process, which has imported torch
        already. gigabytes: how much memory it may take in addition."""
        pid = os.fork()
        if pid == 0:
            become([*map(str, words)], self.log, gigabytes)
        self.children.append(Forked(pid))
        self.sessions.add(pid)

    def living(self) -> list[Process]:
        return [p for p in all_processes() if self.owns(p)]

    def owns(self, process: Process) -> bool:
        if process.session in self.sessions:
            return True
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{TAG}={self.log}\0".encode() in variables

    def ranks(self) -> list[Process]:
        training = {p.pid: p for p in self.living() if p.program == str(TRAIN)}
        return [p for p in training.values() if p.parent not in training]

    def workers(self) -> list[Process]:
        """The children of the ranks."""
        ranks = {p.pid for p in self.ranks()}
        return [p for p in self.living() if p.parent in ranks]

    def launchers(self) -> list[Process]:
        first = {child.pid for child in self.children}
        return [p for p in self.living() if p.pid in first and p.program != str(TRAIN)]

    def wait_for(self, ready: Callable[[], bool], seconds: float = 280) -> bool:
        """Until ready() is true; False if the programs end before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if ready():
                return True
            if all(code is not None for code in self.codes):
                return ready()
            time.sleep(0.005)
        raise Violation(f"nothing happened in {seconds} s: {last_lines(self.said)}")

    def end(self, prompt: float | None = PROMPT, hang: float = HANG) -> None:
        """Wait until all processes of the trial are gone. prompt: None if it may take long; the time that
        they wait for a processor on a busy machine is not counted."""
        began, waits = time.monotonic(), {}
        while True:
            living = self.living()
            for process in living:
                waits.setdefault(process.pid, []).append(process.waited())
            passed = time.monotonic() - began
            if not living and all(code is not None for code in self.codes):
                break
            if passed > hang:
                who = "; ".join(f"{p.pid} {' '.join(p.command[:4])} {waits_in(p)}" for p in living)
                kind = "a hang" if None in self.codes else "a leftover process"
                self.kill()
                raise Violation(f"{kind} after {hang} s: {who}\n{last_lines(self.said)}")
            time.sleep(0.1)  # to look at all processes of the machine takes some milliseconds
        starved = max((each[-1] - each[0] for each in waits.values()), default=0)
        if prompt and passed - starved > prompt:
            raise SlowError(f"it took {passed - starved:.0f} s to end: {last_lines(self.said)}")

    def kill(self) -> None:
        """End what is left, each process by its id."""
        deadline = time.monotonic() + 10
        while (living := self.living()) and time.monotonic() < deadline:
            for process in living:
                process.send(signal.SIGKILL)
            time.sleep(0.05)
        for child in self.children:
            child.poll()


def waits_in(process: Process) -> str:
    """What the kernel says it waits for."""
    try:
        return Path(f"/proc/{process.pid}/wchan").read_text()
    except OSError:
        return ""


def all_processes() -> list[Process]:
    """Of this machine, without those that have ended and were not yet waited for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if state not in "ZX":
            found.append(Process(int(folder.name), int(parent), int(session), tuple(words)))
    return found


def become(words: list[str], log: Path, gigabytes: float | None) -> None:
    """The child's side of a fork; never returns."""
    code = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
            os.dup2(source, descriptor)
        os.closerange(3, 1024)
        os.chdir(ROOT)
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(s, signal.default_int_handler if s == signal.SIGINT else signal.SIG_DFL)
        if gigabytes:
            own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (own + int(gigabytes * 2**30),) * 2)
        sys.argv = words
        sys.stdout = open(1, "w", -1, "utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- shared memory --------------------------------------------------------------------------------


def own_shared_memory() -> bool:
    """Give this process and its children a /dev/shm of their own, so that what is left there is theirs.
    Needs root; returns whether it was possible."""
    libc = ctypes.CDLL(None)
    if os.geteuid() != 0 or libc.unshare(CLONE_NEWNS):
        return False
    for command in ("mount --make-rprivate /", "mount -t tmpfs tmpfs /dev/shm"):
        subprocess.run(command.split(), check=True)
    return True


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}
