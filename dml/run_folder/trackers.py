"""Other loggers through accelerate's trackers: wandb, mlflow and so on, as run.trackers names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dml.errors import RunError
from dml.run_folder.events import Evaluation, Event, Training
from dml.run_folder.tensorboard_log import NAMES, score_name

PROJECT = "dml"


class Trackers:
    """Scalars only, by their names in TensorBoard, with `_at_` for `@`, which mlflow refuses. A tracker
    that fails, such as one without a network, is left out from then on, with a warning: the training must
    not be lost for it.

    A resumed run is a new run for the trackers.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, object],
        say: Callable[[str], None],
    ) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        self.say, self.trackers = say, dict[str, Any]()
        missing = [name for name in names if name not in map(str, get_available_trackers())]
        if missing:
            raise RunError(
                f"run.trackers names {', '.join(missing)}, which cannot be imported here: install its "
                "package, or leave it out"
            )
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in settings.items()
        }
        # what each tracker calls the name of a run, and the folder for its files
        options = {
            "wandb": {"name": folder.name, "dir": str(folder)},
            "mlflow": {"run_name": folder.name},
            "dvclive": {"dir": str(folder / "dvclive")},
        }
        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            where = [str(folder)] if kind.requires_logging_directory else []
            with_options = options.get(name, {})
            self.trackers[name] = kind(PROJECT, *where, **with_options)
        self.each(lambda tracker: (tracker.start(), tracker.store_init_configuration(plain)))

    def each(self, act: Callable[[Any], object]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001  each package has errors of its own
                del self.trackers[name]
                self.say(f"warning: {name} gets nothing more of this run: {error!r}")

    def log(self, event: Event) -> None:
        match event:
            case Training(step, metrics, timing):
                both = {**metrics, **timing}
                values = {NAMES[key]: value for key, value in both.items() if value is not None}
            case Evaluation(step, split, scores, _):
                values = {score_name(split, key): value for key, value in scores.items()}
            case _:
                return
        named = {name.replace("@", "_at_"): value for name, value in values.items()}
        self.each(lambda tracker: tracker.log(named, step=step))

    def close(self) -> None:
        self.each(lambda tracker: tracker.finish())
