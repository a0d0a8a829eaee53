"""What is reported during training, every run.log_steps: to the journal, and to people."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor
from tqdm import tqdm

from dml.config import Run
from dml.distributed.collectives import Wire
from dml.distributed.team import Team
from dml.gpw import GlobalPairLoss
from dml.gpw.monitor import pair_report
from dml.plan import Plan
from dml.run_folder.clock import Clock
from dml.run_folder.events import Pairs, Training
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress

HISTOGRAMS = 10  # lines of metrics per histogram
HEARTBEAT = 60  # seconds between two lines where there is no terminal for a bar


class Reporter:
    """All processes call it, since the report on pairs is one of the global batch."""

    def __init__(
        self,
        team: Team,
        journal: Journal,
        plan: Plan,
        run: Run,
        loss_fn: GlobalPairLoss,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self.team, self.journal, self.plan, self.run = team, journal, plan, run
        self.loss_fn, self.clock, self.progress = loss_fn, clock, progress
        self.last_heartbeat = time.monotonic()
        hide = None if team.first else True  # None: shown on a terminal only
        self.bar = tqdm(total=plan.steps, initial=progress.step, unit="step", disable=hide)

    def report(
        self, metrics: Mapping[str, float | None], embeddings: Tensor, labels: Tensor
    ) -> None:
        """After every step. embeddings and labels: of this process."""
        self.bar.update()
        step = self.progress.step
        if step % self.run.log_steps:
            return
        pairs = pair_report(self.loss_fn.loss, embeddings, labels, self.loss_fn.tile, Wire())
        seen = {
            "images": step * self.plan.batch_size,
            **metrics,
            "anchors_mined": pairs.anchors,
            "positives_per_anchor": pairs.positives,
            "negatives_per_anchor": pairs.negatives,
            "steps_without_pairs": self.progress.without_pairs / step,
        }
        timing = self.clock.timing(self.plan.batch_size, self.loss_fn.wire.bytes_sent)
        self.journal.log(Training(step, seen, timing))
        if step % (HISTOGRAMS * self.run.log_steps) == 0:
            self.journal.log(Pairs(step, pairs))
        self.show(step, f"{metrics['loss']:.4f}", timing["images_per_second"])

    def show(self, step: int, loss: str, images_per_second: float) -> None:
        self.bar.set_postfix(loss=loss)
        if self.bar.disable and time.monotonic() - self.last_heartbeat > HEARTBEAT:
            self.last_heartbeat = time.monotonic()
            self.team.say(f"step {step:,}  loss {loss}  {images_per_second:,.0f} images/s")

    def close(self) -> None:
        self.bar.close()
