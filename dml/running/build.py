"""A run on this process: built from the config, and taken up where it ended."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from dml.config import Config
from dml.data.splits import read_splits
from dml.data.suspicious import suspicious
from dml.distributed.processes import set_numerics
from dml.distributed.team import Team
from dml.distributed.workers import ranks_of_machine
from dml.evaluate import Evaluator
from dml.models import make_towers
from dml.optim import make_loss_optimizer, make_optimizer
from dml.plan import plan
from dml.run_folder.clock import Clock
from dml.run_folder.folder import folder_of, open_folder, write_settings
from dml.run_folder.journal import Journal
from dml.run_folder.reporter import Reporter
from dml.run_folder.saver import (
    Learned,
    Origin,
    Saver,
    last_checkpoint,
    restore,
    restore_memory,
)
from dml.running.coming import Coming
from dml.step import make_loss_fn
from shards.checksums import check_shards


class Run:
    """What the processes of a run have, each its own."""

    def __init__(self, config: Config, team: Team, cleanup: ExitStack) -> None:
        """Build: whatever is wrong with the config, the data or the machine shows here. cleanup: as for
        `dml.training.train`."""
        self.config, self.team, self.folder = config, team, folder_of(config)
        set_numerics(config.engine)
        with team.together():
            self.splits = splits = read_splits(config)
            if config.data.verify:
                ranks = ranks_of_machine(team.rank, team.size)
                for index in splits.indexes:
                    check_shards(index, team.rank - ranks[0], len(ranks))
            self.plan = plan(config, team.size, *splits.sizes)
            self.model: Any = make_towers(config, splits.features, splits.y_features)
            classes = len(splits.train_labels)
            self.loss_fn = make_loss_fn(config, team.size, team.device, classes)
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
        loss_fn, memory = self.loss_fn, self.loss_fn.memory
        origin = Origin.of(config, splits.checksum)
        last = last_checkpoint(team, folder, origin, self.plan.steps)
        optimizer = make_optimizer(config.optim, self.model)
        self.loss_optimizer = make_loss_optimizer(config.optim, loss_fn)
        learned = Learned(loss_fn, self.loss_optimizer) if self.loss_optimizer else None
        model, optimizer, progress = restore(team, last, self.model, optimizer, learned)
        self.model, self.optimizer, self.progress = model, optimizer, progress
        if memory is not None:
            restore_memory(team, last, memory)
        order = range(progress.step, self.plan.steps)
        with team.together():
            self.coming = Coming(config, team, splits, self.spec, loss_fn, order)
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
        self.reporter = Reporter(team, journal, self.plan, config, loss_fn, clock, progress)
