"""The batch of the next step, prepared while this one is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dml.config import Config
from dml.data.ahead import Ahead
from dml.data.copies import DeviceCopies
from dml.data.loader import loader
from dml.data.pair import PairSpec, Spec
from dml.data.splits import Splits, train_batches
from dml.distributed.team import Meeting, Team
from dml.distributed.workers import loader_workers
from dml.gpw import GlobalPairLoss, GlobalProxyLoss
from dml.plan import cache_of
from dml.run_folder.clock import Clock
from dml.step import Pair, of_towers


@dataclass(frozen=True)
class Prepared:
    """The batch of a step, on its way to the device, and the meeting before that step, which has begun.

    all_labels: of the global batch, on the CPU. identities: the numbers of its images; None unless there is
    a memory that asks for them. Of two towers, images, labels and all_labels are pairs.
    """

    images: Tensor | Pair
    labels: Tensor | Pair
    all_labels: Tensor | Pair
    identities: Tensor | None
    meeting: Meeting


class Coming:
    """The batches of this process, in order, from the first step that is still to be made."""

    def __init__(
        self,
        config: Config,
        team: Team,
        splits: Splits,
        spec: Spec,
        loss_fn: GlobalPairLoss | GlobalProxyLoss,
        order: range,
    ) -> None:
        """spec: what the model takes. ShardError if the shards do not fit into the cache."""
        self.config, self.team, self.loss_fn, self.order = config, team, loss_fn, order
        self.own = train_batches(splits, config, spec, team.rank, team.size)
        self.classes = torch.from_numpy(splits.train_labels)
        self.ahead = Ahead(self.own, order, cache_of(config.data))
        self.ahead.refuse_small_cache()

    def start(self, clock: Clock) -> None:
        self.clock, data = clock, self.config.data
        self.batches = loader(self.own, self.order, loader_workers(self.config), data.prefetch)
        self.copies = DeviceCopies(self.team.device)
        if data.cache:
            self.team.wait_until(self.ahead.is_ready)

    def prepare(self, step: int, save: bool) -> Prepared | None:
        """Fetch the batch of a step, and begin all that need not be waited for; None after the last
        step. A batch that cannot be read is never used: the meeting before its step fails. save: whether
        this process wants to save before that step."""
        with self.clock("data"):
            if step == self.order.stop:
                return None
            images, labels = self.team.fetch(self.batches)
            images, labels = self.copies.begin((images, self.numbered(labels)))
            self.ahead.at(step - self.order.start)
            all_labels = self.numbered(torch.from_numpy(self.own.all_labels(step)))
            identities = None
            if self.loss_fn.memory is not None:
                identities = torch.from_numpy(self.own.batches(step)[0])
        meeting, spec = self.team.begin_meeting(save=save), self.own.spec
        if isinstance(spec, PairSpec):  # a sample of x and its y have one label
            pairs = spec.split(images), (labels, labels), (all_labels, all_labels)
            return Prepared(*pairs, identities, meeting)
        return Prepared(images, labels, all_labels, identities, meeting)

    def arrived(self, prepared: Prepared) -> tuple[Tensor | Pair, Tensor | Pair]:
        """Images and labels, when they are on the device."""
        images, labels = prepared.images, prepared.labels
        self.copies.end([*of_towers(images), *of_towers(labels)])
        return images, labels

    def numbered(self, labels: Tensor) -> Tensor:
        """Labels as a loss of proxies has them: numbers of the classes that are trained on."""
        if not isinstance(self.loss_fn, GlobalProxyLoss):
            return labels
        return torch.searchsorted(self.classes, labels.to(self.classes))

    def close(self) -> None:
        self.ahead.close()
