"""What a finished run leaves: the trained model, a picture, the scores."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save
from torch import Tensor

from dml.catalogue import PRESETS
from dml.config import Config
from dml.errors import RunError
from dml.plan import Plan
from dml.run_folder.files import write_json, write_whole
from dml.run_folder.folder import RESULT
from dml.run_folder.progress import Progress


def result_of(
    scores: Mapping[str, float], progress: Progress, plan: Plan, seed: int
) -> dict[str, Any]:
    """The content of result.json. scores: of the test classes, with the weights of the final step; none
    with eval.test=false."""
    step, chosen = progress.final_step, progress.best_step is not None
    return {
        **scores,
        "step": step,
        "images": step * plan.batch_size,
        "trained_steps": progress.step,
        "planned_steps": plan.steps,
        "steps_without_pairs": progress.without_pairs / progress.step,
        "validation_recall@1": progress.best_recall if chosen else None,
        "untrained": progress.untrained,
        "frozen": progress.frozen,
        "seed": seed,
        "seconds": round(progress.seconds, 3),
        "world_size": plan.processes,
    }


def write_result(folder: Path, weights: Mapping[str, Tensor], result: Mapping[str, Any]) -> None:
    """Write the trained model, then the scores with the model's checksum."""
    try:
        model = save({name: x.contiguous().cpu() for name, x in weights.items()})
        write_whole(folder / "model.safetensors", model)
        checksum = hashlib.sha256(model).hexdigest()
        write_json(folder / RESULT, {**result, "model_sha256": checksum})
    except OSError as error:
        raise RunError(
            f"the result of {folder} cannot be written: {error.strerror}; the same command tries "
            "again"
        ) from None


def write_picture(folder: Path, picture: Image.Image) -> None:
    png = io.BytesIO()
    picture.save(png, "PNG", compress_level=3)  # as small as 9 here, in a seventh of the time
    write_whole(folder / "nearest.png", png.getvalue())


def summary(folder: Path, result: Mapping[str, Any], config: Config) -> str:
    """The last lines of a training."""
    pictures = config.eval.test and config.model.backbone != "none"
    picture = "nearest.png, " if pictures else ""
    lines = [f"{folder}: {picture}result.json; tensorboard --logdir {folder.parent}"]
    if result["untrained"]:
        before, after = result["untrained"]["recall@1"], result["recall@1"]
        text = f"Recall@1 of the test classes: {before:.1%} untrained, {after:.1%} trained"
        lines.insert(0, text)
        if after < before:
            lines.insert(1, f"warning: training made it worse; {advice(config)}")
    if result.get("frozen"):
        bound = result["frozen"]["recall@1"]
        after = result.get("recall@1", result["validation_recall@1"])
        beaten = "" if after > bound else ", which training does not beat: it has failed"
        lines.insert(-1, f"Recall@1 of the features without a head: {bound:.1%}{beaten}")
    return "\n".join(lines)


def advice(config: Config) -> str:
    """What to try after a run that ended below its start: first the loss that trains from such
    weights (docs/log.md), then smaller steps and fewer of them."""
    better, other = "paper", PRESETS["the authors' code"]
    if config.model.weights:
        better, other = "authors", PRESETS["the paper's text"]
    loss = config.loss
    unsuited = loss.name == "multi_similarity" and other.items() <= loss.parameters.items()
    first = f"add configs/presets/{better}.yaml to --config, or try " if unsuited else "try "
    return f"{first}a tenth of optim.lr, or fewer steps"
