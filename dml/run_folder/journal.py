"""What a run writes down: TensorBoard, and two files of a JSON object a line.

    runs/NAME/metrics.jsonl     what was learned: a function of the config, the same for an
                                interrupted run and one that went through
    runs/NAME/timing.jsonl      what it took: seconds, bytes, memory
    runs/NAME/events.out.*      both, with histograms and pictures, for TensorBoard

A resumed run takes back what was written after its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from dml.errors import RunError
from dml.gpw.monitor import Histogram, PairReport
from dml.run_folder.files import Lines

# metric -> its name in TensorBoard
METRICS = {
    "images": "train/images",
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
    "anchors_mined": "pairs/anchors_mined",
    "positives_per_anchor": "pairs/positives_per_anchor",
    "negatives_per_anchor": "pairs/negatives_per_anchor",
    "steps_without_pairs": "pairs/steps_without",
}
TIMING = {
    "images_per_second": "speed/images_per_second",
    "seconds_data": "speed/seconds_data",
    "seconds_forward": "speed/seconds_forward",
    "seconds_loss": "speed/seconds_loss",
    "seconds_backward": "speed/seconds_backward",
    "seconds_optimizer": "speed/seconds_optimizer",
    "bytes_sent": "speed/bytes_sent",
    "memory_bytes": "speed/memory_bytes",
}


class Journal:
    """Of the first process. step and size: of which step the run's checkpoint is, and how long
    metrics.jsonl was then.

    What cannot be written (a full disk) does not raise: it becomes the `problem`, about which the
    processes can do something together.
    """

    def __init__(self, folder: Path, step: int = 0, size: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow, and only for one process

        self.folder = folder
        self.problem: RunError | None = None
        with self.noting():
            self.metrics = Lines(folder / "metrics.jsonl", size)
            self.timing = Lines(folder / "timing.jsonl", None)
            # events after the checkpoint are hidden
            purge = step + 1 if step else 0
            self.board: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    @contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = RunError(
                f"the journal in {self.folder} cannot be written: {error.strerror}; make room, and "
                "continue with the same command"
            )

    def training(
        self, step: int, metrics: Mapping[str, float | None], timing: Mapping[str, float]
    ) -> None:
        with self.noting():
            self.metrics.write({"step": step, **metrics})
            self.timing.write({"step": step, "time": round(time.time(), 3), **timing})
            for names, values in ((METRICS, metrics), (TIMING, timing)):
                for key, value in values.items():
                    if value is not None:
                        self.board.add_scalar(names[key], value, step)

    def size(self) -> int:
        """How long metrics.jsonl is, once it is all on disk."""
        with self.noting():
            return self.metrics.synced()
        return 0

    def pairs(self, step: int, report: PairReport) -> None:
        with self.noting():
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
        self.board.add_histogram_raw(
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

    def evaluation(
        self, step: int, split: str, scores: Mapping[str, float], picture: Image.Image
    ) -> None:
        with self.noting():
            self.metrics.write({"step": step, "split": split, **scores})
            for key, value in scores.items():
                self.board.add_scalar(f"{split}/{key}", value, step)
            self.board.add_image(f"{split}/nearest", np.asarray(picture), step, dataformats="HWC")
            self.board.flush()

    def projector(self, embeddings: Tensor, names: list[str], thumbnails: Tensor) -> None:
        """thumbnails: n x h x w x 3, uint8."""
        images = thumbnails.permute(0, 3, 1, 2).float() / 255
        with self.noting():
            self.board.add_embedding(embeddings.float(), metadata=names, label_img=images)

    def hparams(
        self, config: Mapping[str, Mapping[str, object]], scores: Mapping[str, float]
    ) -> None:
        """The settings and scores of the run, for TensorBoard's table of runs."""
        from torch.utils.tensorboard.summary import hparams

        settings = {
            f"{section}.{key}": value if isinstance(value, bool | int | float | str) else str(value)
            for section, values in config.items()
            for key, value in values.items()
        }
        # the table shows the last of these, which is the final evaluation's
        for summary in hparams(settings, {f"test/{key}": score for key, score in scores.items()}):  # type: ignore[no-untyped-call]
            self.board.file_writer.add_summary(summary)

    def close(self) -> None:
        with self.noting():
            self.board.close()
            self.metrics.file.close()
            self.timing.file.close()
