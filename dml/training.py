"""The story of a run: build, resume, loop, finish.

Every process runs this at the same time. `team` is what a process knows of the others, and the only
way in which they fail, save or leave together. Only the first process looks into the run's folder.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dml.config import Config
from dml.data.ahead import Ahead
from dml.data.copies import DeviceCopies
from dml.data.loader import loader
from dml.data.splits import read_splits, train_batches
from dml.data.suspicious import suspicious
from dml.distributed.full_state import read_weights, write_weights
from dml.distributed.processes import set_numerics
from dml.distributed.signals import Interrupted
from dml.distributed.team import Meeting, Team
from dml.distributed.workers import loader_workers, ranks_of_machine
from dml.errors import NotFiniteError
from dml.evaluate import Evaluator, evaluation_due
from dml.gpw import GlobalProxyLoss
from dml.models import make_model
from dml.optim import learning_rate, make_loss_optimizer, make_optimizer, set_learning_rate
from dml.plan import cache_of, plan
from dml.run_folder.clock import Clock
from dml.run_folder.folder import folder_of, is_of_length, open_folder, sound_result, write_settings
from dml.run_folder.journal import Journal
from dml.run_folder.reporter import Reporter
from dml.run_folder.result import result_of, summary, write_result
from dml.run_folder.saver import (
    Learned,
    Origin,
    Saver,
    last_checkpoint,
    restore,
    restore_memory,
)
from dml.step import make_loss_fn, seed_random_layers, update
from shards.checksums import check_shards


def train(config: Config, team: Team, cleanup: ExitStack) -> None:
    """Train what the config asks for, or what is left of it.

    cleanup: closed when all processes have ended; the run's folder is reserved until then.
    """
    run = Run(config, team, cleanup)
    result = team.from_first(sound_result(run.folder) if team.first else None)
    if result is not None and is_of_length(result, run.plan.steps):
        team.say(
            f"{run.folder} is finished already: see its result.json; a larger length trains it longer"
        )
        return
    team.meet()
    run.resume()
    with closing(run.journal), closing(run.reporter), closing(run.saver), closing(run.ahead):
        try:
            run.loop()
            run.finish()
        except Interrupted as stopped:
            run.saver.save()
            run.saver.settle()
            done = f"after step {run.progress.step:,} of {run.plan.steps:,}"
            raise Interrupted(f"{stopped} {done}") from None
        except NotFiniteError as error:
            since = f"step {run.saver.step:,}, of the last checkpoint"
            raise NotFiniteError(
                f"training diverged between {since}, and step {run.progress.step + 1:,}: {error}; lower "
                "optim.lr, or look at the images of these steps"
            ) from None


@dataclass(frozen=True)
class Prepared:
    """The batch of a step, on its way to the device, and the meeting before that step, which has begun.

    all_labels: of the global batch, on the CPU. identities: the numbers of its images; None unless there is
    a memory that asks for them.
    """

    images: Tensor
    labels: Tensor
    all_labels: Tensor
    identities: Tensor | None
    meeting: Meeting


class Run:
    """A run on this process."""

    def __init__(self, config: Config, team: Team, cleanup: ExitStack) -> None:
        """Build: whatever is wrong with the config, the data or the machine shows here."""
        self.config, self.team, self.folder = config, team, folder_of(config)
        set_numerics(config.engine)
        with team.together():
            self.splits = read_splits(config)
            if config.data.verify:
                ranks = ranks_of_machine(team.rank, team.size)
                for data in self.splits.datasets:
                    check_shards(data.index, team.rank - ranks[0], len(ranks))
            self.plan = plan(config, team.size, *self.splits.sizes)
            features = self.splits.features
            self.model: Any = make_model(config.model, config.data, config.run.seed, features)
            self.classes = torch.from_numpy(self.splits.train_labels)
            self.loss_fn = make_loss_fn(config, team.size, team.device, len(self.classes))
            if team.first:
                cleanup.enter_context(open_folder(config))
        self.spec = self.model.spec
        if config.engine.precision == "fp64":
            self.model = self.model.double()
        if team.accelerator.state.deepspeed_plugin is None:  # which flattens weights
            self.model.to(memory_format=torch.channels_last)  # as the images are: faster
        if config.engine.compile:
            self.model.compile()

    def resume(self) -> None:
        """Start from the run's own last checkpoint, else the weights of the config, else scratch."""
        config, team, folder, splits = self.config, self.team, self.folder, self.splits
        origin = Origin.of(config, splits.checksum)
        last = last_checkpoint(team, folder, origin, self.plan.steps)
        optimizer = make_optimizer(config.optim, self.model)
        self.loss_optimizer = make_loss_optimizer(config.optim, self.loss_fn)
        learned = Learned(self.loss_fn, self.loss_optimizer) if self.loss_optimizer else None
        model, optimizer, progress = restore(team, last, self.model, optimizer, learned)
        self.model, self.optimizer, self.progress = model, optimizer, progress
        memory = self.loss_fn.memory
        if memory is not None:
            restore_memory(team, last, memory)
        self.own = train_batches(splits, config, self.spec, team.rank, team.size)
        self.order = range(progress.step, self.plan.steps)
        with team.together():
            self.ahead = Ahead(self.own, self.order, cache_of(config.data))
            self.ahead.refuse_small_cache()
            self.journal = journal = Journal.open(team, folder, progress, config)
            if team.first:
                write_settings(folder, config, self.plan)
            warnings = suspicious(splits, config) if team.first else []
        team.say("\n".join([str(self.plan), f"{'folder':<25}  {folder}", *warnings]))
        self.clock = clock = Clock(team.device, progress.seconds)
        self.saver = Saver(
            team, folder, origin, model, optimizer, progress, journal, learned, memory
        )
        self.evaluator = Evaluator(team, splits, self.spec, config, self.plan, journal)
        self.reporter = Reporter(team, journal, self.plan, config, self.loss_fn, clock, progress)

    def loop(self) -> None:
        """Evaluate where it is due, meet the others, update and prepare the next batch meanwhile; until
        the last step."""
        config, team, progress, steps = self.config, self.team, self.progress, self.plan.steps
        model, optimizer, micro = self.model, self.optimizer, config.engine.micro_batch
        workers, prefetch = loader_workers(config), config.data.prefetch
        if config.eval.frozen and progress.step == 0:
            split = "test" if config.eval.test else "validation"
            progress.frozen = self.evaluator.frozen(model, split)
        self.batches = loader(self.own, self.order, workers, prefetch)
        self.copies = DeviceCopies(team.device)
        if config.data.cache:
            team.wait_until(self.ahead.is_ready)
        prepared = self.prepare(progress.step)

        def meanwhile() -> None:
            nonlocal prepared
            prepared = self.prepare(progress.step + 1)

        while True:
            if progress.step == steps:
                # before the last evaluation, which a longer run does not have
                self.saver.save()
            which = evaluation_due(config.eval, progress.step, steps)
            if which and progress.evaluated != progress.step:
                scores = self.evaluator(model, which, progress.step).scores
                if progress.is_best(which, scores):
                    self.saver.save_best()
            if progress.step == steps or progress.stale == config.eval.patience:
                return

            assert prepared is not None
            if prepared.meeting.end():
                self.saver.save()
            images, labels = prepared.images, prepared.labels
            self.copies.end([images, labels])
            seed_random_layers(config.run.seed, progress.step, team.rank)
            lr = learning_rate(config.optim, progress.step, steps)
            set_learning_rate(optimizer, lr)
            if self.loss_optimizer is not None:
                set_learning_rate(self.loss_optimizer, lr)
            done = update(
                team.accelerator,
                model,
                self.loss_fn,
                optimizer,
                images,
                labels,
                micro,
                self.clock,
                all_labels=prepared.all_labels,
                identities=prepared.identities,
                meanwhile=meanwhile,
                loss_optimizer=self.loss_optimizer,
            )
            progress.count(done.loss, self.clock.total())
            metrics = {"loss": done.loss, "lr": lr, "gradient_norm": done.gradient_norm}
            if done.loss_gradient_norm is not None:
                metrics["loss_gradient_norm"] = done.loss_gradient_norm
            assert isinstance(done.embeddings, Tensor)
            self.reporter.report(metrics, done.embeddings, labels)

    def prepare(self, step: int) -> Prepared | None:
        """Fetch the batch of a step, and begin all that need not be waited for; None after the last
        step. A batch that cannot be read is never used: the meeting before its step fails."""
        with self.clock("data"):
            if step == self.plan.steps:
                return None
            images, labels = self.team.fetch(self.batches)
            images, labels = self.copies.begin((images, self.numbered(labels)))
            self.ahead.at(step - self.order.start)
            all_labels = self.numbered(torch.from_numpy(self.own.batches.all_labels(step)))
            identities = None
            if self.loss_fn.memory is not None:
                identities = torch.from_numpy(self.own.batches(step)[0])
        due = self.saver.age() > 60 * self.config.save.every_minutes
        return Prepared(images, labels, all_labels, identities, self.team.begin_meeting(save=due))

    def numbered(self, labels: Tensor) -> Tensor:
        """Labels as a loss of proxies has them: numbers of the classes that are trained on."""
        if not isinstance(self.loss_fn, GlobalProxyLoss):
            return labels
        return torch.searchsorted(self.classes, labels.to(self.classes))

    def finish(self) -> None:
        """Evaluate the test classes with the best step by the validation classes, or else the last;
        write the result."""
        team, progress, accelerator = self.team, self.progress, self.team.accelerator
        self.saver.save()
        if progress.best_step is not None:
            write_weights(accelerator, self.model, self.saver.best())
        found = None
        if self.config.eval.test:
            found = self.evaluator(self.model, "test", progress.final_step)
        weights = read_weights(accelerator, self.model)
        progress.seconds = self.clock.total()
        scores = found.scores if found else {}
        result = result_of(scores, progress, self.plan, self.config.run.seed)
        self.saver.settle()
        with team.together():
            self.journal.sync()  # all metrics are on disk before the run counts as finished
        with team.together():
            if team.first:
                write_result(self.folder, weights, result)
        if found and team.first:
            self.evaluator.decorate(self.folder, self.config, found)
        team.say(summary(self.folder, result, self.config))
