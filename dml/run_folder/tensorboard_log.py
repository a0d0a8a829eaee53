"""TensorBoard's event files: scalars, histograms, pictures, the projector, the table of runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from dml.gpw.monitor import Histogram, PairReport
from dml.run_folder.events import End, Evaluation, Event, Pairs, Training

# metric or timing -> its name in TensorBoard, which sorts by name: main comes first
NAMES = {
    "loss": "main/loss",
    "images": "train/images",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "loss_gradient_norm": "train/loss_gradient_norm",
    "anchors_mined": "pairs/anchors_mined",
    "positives_per_anchor": "pairs/positives_per_anchor",
    "negatives_per_anchor": "pairs/negatives_per_anchor",
    "steps_without_pairs": "pairs/steps_without",
    "anchors_with_memory": "pairs/anchors_with_memory",
    "images_per_second": "speed/images_per_second",
    "seconds_data": "speed/seconds_data",
    "seconds_forward": "speed/seconds_forward",
    "seconds_loss": "speed/seconds_loss",
    "seconds_backward": "speed/seconds_backward",
    "seconds_optimizer": "speed/seconds_optimizer",
    "bytes_sent": "speed/bytes_sent",
    "memory_bytes": "speed/memory_bytes",
}


def score_name(split: str, score: str) -> str:
    return f"main/{split}_{score}" if score == "recall@1" else f"{split}/{score}"


class TensorBoard:
    """step: that of the run's checkpoint; events after it are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,  # slow, and only the first process needs it
        )

        self.hook, threading.excepthook = threading.excepthook, self.thread_failed
        purge = step + 1 if step else 0
        self.writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    def log(self, event: Event) -> None:
        match event:
            case Training(step, metrics, timing):
                for key, value in {**metrics, **timing}.items():
                    if value is not None:
                        self.writer.add_scalar(NAMES[key], value, step)
            case Pairs(step, report):
                self.pairs(step, report)
            case Evaluation(step, split, scores, picture):
                for key, value in scores.items():
                    self.writer.add_scalar(score_name(split, key), value, step)
                if picture is not None:
                    image = np.asarray(picture)
                    self.writer.add_image(f"{split}/nearest", image, step, dataformats="HWC")
                self.writer.flush()
            case End():
                self.table_of_runs(event)
                images, vectors = event.thumbnails, event.embeddings.float()
                if images is not None:
                    images = images.permute(0, 3, 1, 2).float() / 255
                self.writer.add_embedding(vectors, metadata=list(event.names), label_img=images)

    def pairs(self, step: int, report: PairReport) -> None:
        for name, histogram in (
            ("positive_similarities", report.positive_similarities),
            ("negative_similarities", report.negative_similarities),
            ("log10_weights", report.weights),
        ):
            self.histogram(f"pairs/{name}", histogram, step)

    def histogram(self, tag: str, h: Histogram, step: int) -> None:
        counts = h.counts.cpu().numpy()
        if not counts.any():
            return
        edges = np.linspace(h.low, h.high, len(counts) + 1)
        middles = (edges[1:] + edges[:-1]) / 2
        self.writer.add_histogram_raw(
            tag,
            min=middles[counts > 0].min(),
            max=middles[counts > 0].max(),
            num=counts.sum(),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def table_of_runs(self, end: End) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in end.settings.items()
        }
        # Without the description of the experiment, which comes first, TensorBoard finds out by itself
        # which settings differ between the runs and shows these. The table has the last value of every
        # scalar, of the test scores that of the final evaluation.
        _, start, end_of_session = hparams(settings, {})  # type: ignore[no-untyped-call]
        for summary in (start, end_of_session):
            self.writer.file_writer.add_summary(summary)

    def thread_failed(self, failure: Any) -> None:
        """The writer's thread could not write. The next `log` raises the same error, so that its
        traceback would only hide the sentence about it."""
        ours = type(failure.thread).__module__.startswith("tensorboard.")
        if not (ours and isinstance(failure.exc_value, OSError)):
            self.hook(failure)

    def close(self) -> None:
        try:
            self.writer.close()
        finally:
            threading.excepthook = self.hook
