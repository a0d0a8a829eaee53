"""What is reported during training, every run.log_steps: to the journal, and to people."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor
from tqdm import tqdm

from dml.config import Config
from dml.distributed.collectives import Wire
from dml.distributed.team import Team
from dml.gpw import GlobalPairLoss, GlobalProxyLoss
from dml.gpw.monitor import PairReport, pair_report
from dml.gpw.weighting import PairLoss
from dml.plan import Plan
from dml.run_folder.clock import Clock
from dml.run_folder.events import Pairs, Training
from dml.run_folder.journal import Journal
from dml.run_folder.progress import Progress
from shards.output import EVERY, time_left

Towers = tuple[Tensor, Tensor]  # the tensors of both
HISTOGRAMS = 10  # lines of metrics per histogram, after that of the first line


class Reporter:
    """All processes call it, since the report on pairs is one of the global batch."""

    def __init__(
        self,
        team: Team,
        journal: Journal,
        plan: Plan,
        config: Config,
        loss_fn: GlobalPairLoss | GlobalProxyLoss,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self.team, self.journal, self.plan, self.run = team, journal, plan, config.run
        self.tile = config.engine.tile
        self.loss_fn, self.clock, self.progress = loss_fn, clock, progress
        self.first_step = progress.step
        self.started = self.last_line = time.monotonic()
        hide = None if team.first else True  # None: shown on a terminal only
        self.bar = tqdm(total=plan.steps, initial=progress.step, unit="step", disable=hide)

    def report(
        self,
        metrics: Mapping[str, float | None],
        embeddings: Tensor | Towers,
        labels: Tensor | Towers,
    ) -> None:
        """After every step. embeddings and labels: of this process."""
        self.bar.update()
        self.show(f"{metrics['loss']:.4f}")
        step, every = self.progress.step, self.run.log_steps
        if step % every:
            return
        pairs = self.pairs(embeddings, labels)
        seen = {
            "images": step * self.plan.batch_size,
            **metrics,
            **({} if pairs is None else of_pairs(pairs)),
            "steps_without_pairs": self.progress.without_pairs / step,
            **self.of_memory(),
        }
        timing = self.clock.timing(self.plan.batch_size, self.loss_fn.wire.bytes_sent)
        self.journal.log(Training(step, seen, timing))
        if pairs is not None and (step == every or step % (HISTOGRAMS * every) == 0):
            self.journal.log(Pairs(step, pairs))

    def pairs(self, embeddings: Tensor | Towers, labels: Tensor | Towers) -> PairReport | None:
        """What the loss sees in the batch; None of two towers, and of a loss with proxies."""
        loss = self.loss_fn.loss
        if isinstance(embeddings, tuple) or isinstance(labels, tuple):
            return None
        if not isinstance(loss, PairLoss):
            return None
        return pair_report(loss, embeddings, labels, self.tile, Wire())

    def of_memory(self) -> dict[str, float | None]:
        """The share of the anchors of the last batch that found a positive in the memory; None: it was
        not used yet."""
        memory = self.loss_fn.memory
        if memory is None:
            return {}
        if memory.found is None:
            return {"anchors_with_memory": None}
        return {"anchors_with_memory": Wire().gather(memory.found)[0].mean().item()}

    def show(self, loss: str) -> None:
        """On a terminal in the bar, elsewhere in a line per minute."""
        self.bar.set_postfix(loss=loss, refresh=False)
        now = time.monotonic()
        if self.bar.disable and now - self.last_line >= EVERY:
            self.last_line = now
            self.team.say(self.line(loss, now - self.started))

    def line(self, loss: str, seconds: float) -> str:
        """seconds: since this start of the run, evaluations and checkpoints included."""
        step, steps = self.progress.step, self.plan.steps
        speed = (step - self.first_step) / seconds
        images = speed * self.plan.batch_size
        left = time_left(steps - step, speed)
        return f"step {step:,} of {steps:,}  loss {loss}  {images:,.1f} images/s  {left}"

    def close(self) -> None:
        self.bar.close()


def of_pairs(report: PairReport) -> dict[str, float]:
    return {
        "anchors_mined": report.anchors,
        "positives_per_anchor": report.positives,
        "negatives_per_anchor": report.negatives,
    }
