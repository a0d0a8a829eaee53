"""A launcher whose processes are forks of it, so that they need not import torch again.

    python launching.py PROGRAM ...

PROGRAM runs as `__main__`. A process that it starts as `python SCRIPT ...` or `python -m MODULE ...` is its
child as ever, with the session, folder, files, signals and environment that it gives it, and with the first
sitecustomize.py of PYTHONPATH; only a new interpreter there is none. A launcher that has threads, such as
torchrun's, starts its processes as ever.
"""

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

execute = subprocess.Popen._execute_child


def execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
    """Instead of Popen's own method of this name."""
    _, _, _, stdin, _, _, stdout, _, stderr, _, _, _, _, _, new_session, *_ = more
    python, *script = [os.fspath(word) for word in args]
    if script[:1] == ["-u"]:  # of torch's launcher
        del script[0]
    alone = (
        len(os.listdir("/proc/self/task")) == 1
    )  # a lock that another thread holds stays locked in a fork
    is_ours = script[:1] == ["-m"] or script[0].endswith(".py")
    if python != sys.executable or not is_ours or not alone:
        execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    self.pid = os.fork()
    if self.pid == 0:
        if new_session:
            os.setsid()
        for number, source in enumerate((stdin, stdout, stderr)):
            if source != -1:
                os.dup2(source, number)
        close_all_but({0, 1, 2, *pass_fds})
        os.chdir(cwd or ".")
        forget_handlers()
        weakref.finalize._registry.clear()  # else it would remove the launcher's temporary folders
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run(script, os.environ.copy() if env is None else env)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    self._child_created = True
    self._close_pipe_fds(*more[3:9])


def close_all_but(kept):
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        try:
            os.close(number)
        except OSError:  # the listing itself
            continue


def forget_handlers():
    """As a new interpreter begins."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def take_over(command, env):
    """Make a script and its arguments, and the environment, those of this process. /proc shows them, too:
    it reads the memory in which they were when the interpreter started."""
    os.environ.clear()
    os.environ.update(env)
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], os.getcwd()
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(command[0])
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words, words_end, variables, variables_end = map(int, fields[45:49])
    for start, end, texts in (
        (words, words_end, [sys.executable, *command]),
        (variables, variables_end, [f"{name}={value}" for name, value in env.items()]),
    ):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(shown) <= end - start, f"{len(shown)} bytes do not fit into {end - start}"
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def run(script, env):
    """What a new interpreter does: its hook, and the script."""
    take_over(script, env)
    for folder in env.get("PYTHONPATH", "").split(":"):
        if os.path.exists(hook := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(hook)
            break
    run_to_its_end(sys.argv[0], is_module=script[0] == "-m")


def run_to_its_end(name, is_module=False):
    """Run a script or a module, and end this process as the interpreter would, with the same exit code,
    but without taking the modules apart: that takes a second of CPU time after torch was imported."""
    code = 1
    try:
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        finally:
            threading._shutdown()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = -signal.SIGINT
        sys.excepthook(*sys.exc_info())
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


if __name__ == "__main__":
    subprocess.Popen._execute_child = execute_child
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    run_to_its_end(sys.argv[0])
