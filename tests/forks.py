"""Forks of a process that has imported torch: a new interpreter would need two seconds for that.

    python forks.py          serves the tests: it forks when it is asked to on its standard input

A fork is a process like any other. It runs a script as `__main__` with arguments, environment, folder
and session of its own, which /proc shows, and ends as a script does. What its imports do cannot be
tested with it, nor what is set before Python starts, such as LD_PRELOAD.

A launcher that is started with tests/workers/launching.py starts its processes as forks of itself.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache

# Room for the words and the variables of a fork, where /proc looks for those of the process that forks.
ROOM_FOR_WORDS, ROOM_FOR_VARIABLES = 2**14, 2**16


class Forked:
    """A fork, with as much of the interface of Popen as the tests need.

    command: a script and its arguments. stdout and stderr: files, perhaps the same one.
    """

    def __init__(self, command, cwd, env, stdout, stderr):
        self.returncode = None
        self.answers, write = os.pipe()
        request = json.dumps([[*map(str, command)], str(cwd), env, str(stdout), str(stderr)])
        socket.send_fds(server(), [request.encode()], [write])
        os.close(write)
        self.pid = self.answer()

    def answer(self):
        """The next number from the parent of the fork: its id, and later its exit code."""
        number = os.read(self.answers, 8)
        if not number:
            raise RuntimeError("the process that forks, or the parent of a fork, has ended")
        return int.from_bytes(number, "little", signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"the process {self.pid}", timeout)
            self.returncode = self.answer()
            os.close(self.answers)
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@cache
def server():
    """A connection to the process that forks, one per process of pytest."""
    from fleet import environment

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, "." * ROOM_FOR_WORDS],
            stdin=theirs,
            env={**environment(), "ROOM": "." * ROOM_FOR_VARIABLES},
            start_new_session=True,
        )

    def end():
        ours.shutdown(socket.SHUT_RDWR)  # also where a worker of a loader holds a copy
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(requests):
    """Fork for every request, until the tests close the connection. Returns the request in the fork."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 2**20, 1)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            pid = os.fork()
            if pid == 0:
                return json.loads(request)
            keep(pid, *descriptors)
        os.close(*descriptors)
        while reaped():
            pass


def keep(pid, answers):
    """The parent of a fork: tells its id and how it ends, and ends with it."""
    os.write(answers, pid.to_bytes(8, "little", signed=True))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, code.to_bytes(8, "little", signed=True))
    os._exit(0)


def reaped():
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def become(command, cwd, env, stdout, stderr):
    """Turn this process into what was asked for, up to its script."""
    os.setsid()
    os.closerange(3, 1024)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (stdout, append), (stderr, append)]
    ):
        os.dup2(os.open(path, flags), number)
    os.chdir(cwd)
    take_over(command, env)


def import_for_forks():
    """Everything that a run and its launcher import, and what torch imports for its first optimizer."""
    import accelerate.commands.accelerate_cli  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.utils.tensorboard  # noqa: F401

    import dml.training  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.freeze()  # else the first collection of a fork would write to, and so copy, every page of objects


if __name__ == "__main__":
    from launching import run_to_its_end, take_over  # of tests/workers, on the path of this process

    import_for_forks()
    become(*serve(socket.socket(fileno=0)))
    run_to_its_end(sys.argv[0])
