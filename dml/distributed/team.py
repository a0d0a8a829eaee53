"""The processes of a run, as one of them sees the others.

A mistake that one process meets alone (a folder missing on its machine, a damaged shard, a full disk,
a signal) must not leave the others waiting in a collective. So processes fail, save and leave
together, in one of two ways:

    with team.together():            set-up: all get through the block, or all raise the same mistake
        ...
    batch = team.fetch(batches)      training: a problem of this process is noted ...
    if team.meet(save=due):          ... and the next meeting raises it on all of them, or raises
        save()                       Interrupted on all of them, or agrees to save

A meeting may begin while a step is computed and end before the next one, so that nobody waits for it:

    meeting = team.begin_meeting(save=due)
    ...
    if meeting.end():
        save()

Processes meet on the CPU (gloo), whatever the device: a GPU is not asked, and does not wait.
Any other exception ends its process at once, and the launcher ends the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from dml.distributed.processes import control_group, refuse_shared_gpus
from dml.distributed.signals import Interrupt, Interrupted
from dml.errors import MISTAKES, NotFiniteError
from shards.item import ShardError
from shards.output import discard_output

Value = TypeVar("Value")
Batch = tuple[Tensor, Tensor]  # images, and a number for each

# what a process wants at a meeting; the largest wish of any process is granted
CONTINUE, SAVE, LEAVE, FAIL = range(4)


class Team:
    """problem: what this process has noted, and raises at the next meeting."""

    def __init__(self, accelerator: Accelerator, interrupt: Interrupt) -> None:
        self.accelerator, self.interrupt = accelerator, interrupt
        self.rank: int = accelerator.process_index
        self.size: int = accelerator.num_processes
        self.first: bool = accelerator.is_main_process
        self.device: torch.device = accelerator.device
        self.problem: Exception | None = None
        self.group = control_group() if self.size > 1 else None
        if self.device.type == "cuda" and self.size > 1:
            refuse_shared_gpus(self.group)

    def say(self, text: str) -> None:
        """Print a line, on the first process only, above any progress bar."""
        if self.first:
            try:
                tqdm.write(text)
                sys.stdout.flush()  # a log shows it at once
            except BrokenPipeError:  # nobody reads any more, which is no reason to stop training
                discard_output()

    def from_first(self, value: Value) -> Value:
        """The first process's value, on all of them."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, 0)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes get through this block, or all raise the same mistake."""
        problem: Exception | None = None
        try:
            yield
            problem = self.problem
        except (*MISTAKES, NotFiniteError) as error:
            problem = error
        if self.size > 1:
            everyone: list[Exception | None] = [None] * self.size
            dist.all_gather_object(everyone, problem)
            problem = next((error for error in everyone if error is not None), None)
        if problem is not None:
            raise problem from None

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until all processes are ready, however long one takes: a collective gives up after some
        minutes. Signals and problems end it."""
        while True:
            self.meet()
            ready = torch.tensor(int(is_ready()))
            if self.size > 1:
                dist.all_reduce(ready, dist.ReduceOp.MIN, group=self.group)
            if ready:
                return
            time.sleep(0.2)

    def note(self, problem: Exception) -> None:
        """Fail at the next meeting, on all processes."""
        self.problem = self.problem or problem

    def fetch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch of this process. If it cannot be read the reason is noted, and the batch is
        empty: go to the next meeting with it."""
        try:
            return next(batches)
        except ShardError as error:
            # a loader's worker wraps the sentence in its traceback
            self.note(ShardError(str(error).rpartition("ShardError: ")[2].strip()))
            return torch.empty(0), torch.empty(0)

    def meet(self, save: bool = False) -> bool:
        """Between two batches: fail together, leave together, or agree whether to save."""
        return self.begin_meeting(save).end()

    def begin_meeting(self, save: bool = False) -> Meeting:
        """Tell the others what this process wants, and do not wait for their answers."""
        wishes = {FAIL: self.problem, LEAVE: self.interrupt.received, SAVE: save, CONTINUE: True}
        return Meeting(self, max(each for each, wanted in wishes.items() if wanted))


class Meeting:
    """A meeting that has begun. What was noted since then waits for the next one."""

    def __init__(self, team: Team, wish: int) -> None:
        self.team, self.largest = team, torch.tensor(wish)
        self.sent: dist.Work | None = None
        if team.size > 1:
            self.sent = dist.all_reduce(
                self.largest, dist.ReduceOp.MAX, group=team.group, async_op=True
            )

    def end(self) -> bool:
        """Fail together, leave together, or agree whether to save: the same on every process."""
        if self.sent is not None:
            self.sent.wait()
        wish, team = int(self.largest), self.team
        if wish == FAIL:
            with team.together():
                pass
        if wish == LEAVE:
            raise Interrupted(
                f"stopped by {team.interrupt.received or 'a signal to another process'}"
            )
        return wish == SAVE
