"""Worker processes that are known to have begun.

Other threads run while a process forks: those of gloo enter Python whenever a collective ends, and hold a
lock of the interpreter while they do. A fork at that moment copies the lock but not its owner, and the child
waits for ever inside of os.fork (CPython 3.11; one of some 1,600 workers in docs/log.md, 2026-11-18). So every
child says that it has begun; one that does not is killed, and forked again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

from shards.item import ShardError

PATIENCE = (10, 20, 40)  # seconds for each attempt; the machine may be busy


class BegunPopen(Popen):
    """Forks until a child has begun."""

    def _launch(self, process_obj: BegunProcess) -> None:
        for seconds in PATIENCE:
            process_obj.pipe = reading, writing = os.pipe()
            super()._launch(process_obj)  # type: ignore[misc]
            os.close(writing)
            begun = select.select([reading], [], [], seconds)[0]
            os.close(reading)
            if begun:
                return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            assert self.finalizer is not None
            self.finalizer()
        raise ShardError(
            f"a loader process did not begin in {len(PATIENCE)} attempts, the last of {PATIENCE[-1]} s: the "
            "machine may be overloaded; try again, or set data.workers=0"
        )


class BegunProcess(ForkProcess):
    """A child that tells its parent that it has begun."""

    pipe: tuple[int, int]

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return BegunPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        reading, writing = self.pipe
        os.close(reading)
        os.write(writing, b".")
        os.close(writing)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class BegunContext(ForkContext):
    Process = BegunProcess


def fork_context() -> BaseContext | None:
    """How workers start: forked on Linux, elsewhere as Python prefers."""
    return BegunContext() if sys.platform == "linux" else None
