"""Where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Progress:
    """All that a resumed run must know besides its tensors. The batches, crops and learning rates of
    every step are functions of the config and the step."""

    step: int = 0  # updates done
    evaluated: int = -1  # the step that was evaluated last
    without_pairs: int = 0  # steps that found no informative pair
    best_step: int | None = None  # by the validation classes
    best_recall: float = -1.0
    stale: int = 0  # evaluations of the validation classes since the best one
    untrained: dict[str, float] | None = None  # scores of the test classes at step 0
    frozen: dict[str, float] | None = None  # scores of the features before the head, at step 0
    seconds: float = 0.0
    metrics_size: int = 0  # bytes of metrics.jsonl

    def count(self, loss: float, seconds: float) -> None:
        """Note an update. seconds: since the run began."""
        self.step += 1
        self.without_pairs += loss == 0  # no anchor had anything to learn from
        self.seconds = seconds

    def is_best(self, split: str, scores: Mapping[str, float]) -> bool:
        """Note an evaluation; whether it is the best of the validation classes so far."""
        self.evaluated = self.step
        if self.step == 0:
            self.untrained = dict(scores)
        elif split == "validation":
            return self.improves(scores["recall@1"])
        return False

    def improves(self, recall: float) -> bool:
        self.stale += 1
        if recall <= self.best_recall:
            return False
        self.best_step, self.best_recall, self.stale = self.step, recall, 0
        return True

    @property
    def final_step(self) -> int:
        """The step whose weights are the result: the best by the validation classes, or the last."""
        return self.step if self.best_step is None else self.best_step
