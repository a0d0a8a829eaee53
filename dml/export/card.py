"""A folder in the form of Hugging Face: weights, code without dml, and a card of what the model is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save
from torch.export import ExportedProgram

from dml import __version__
from dml.config import Config, flatten, to_yaml
from dml.data.preprocessing import Input
from dml.export.graph import as_python
from dml.export.preprocessing import FILE, description, source
from dml.inference.whole_folder import replace_folder
from dml.models import Embedder
from dml.run_folder.folder import sound_result

CARD, CONFIG = "README.md", "config.json"
WRITTEN = {CARD, CONFIG, FILE, "model.py", "model.safetensors", "training.yaml"}
FORMAT = "dml-model"
DATASETS = {
    "sop": "Stanford Online Products",
    "cub200": "CUB-200-2011",
    "cars196": "Cars-196",
    "inshop": "In-Shop Clothes Retrieval",
    "icons": "icons of 130 families (docs/icons.md of dml)",
    "folder": "a folder of photos",
}


def is_folder(folder: Path) -> bool:
    """Whether `write_folder` made everything in a folder, so that it may be replaced."""
    try:
        head = json.loads((folder / CONFIG).read_bytes())
        return head["format"] == FORMAT and {path.name for path in folder.iterdir()} <= WRITTEN
    except (OSError, ValueError, TypeError, KeyError):
        return False


def write_folder(
    folder: Path, run: Path, config: Config, program: ExportedProgram, model: Embedder
) -> None:
    spec = model.spec
    assert isinstance(spec, Input)  # a head on features has no such folder

    def files() -> Iterator[tuple[str, bytes]]:
        head = {
            "format": FORMAT,
            "dml_version": __version__,
            "architecture": config.model.backbone,
            "embedding_size": config.model.embedding_size,
            "preprocessing": description(spec),
        }
        yield CONFIG, json.dumps(head, indent=1).encode() + b"\n"
        yield "model.safetensors", save({k: x.contiguous() for k, x in model.state_dict().items()})
        yield "model.py", as_python(program).encode()
        yield FILE, source(spec).encode()
        yield "training.yaml", to_yaml(config).encode()
        yield CARD, model_card(config, sound_result(run) or {}, folder.name).encode()

    replace_folder(folder, files())


def measured(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in result.items()
        if name.startswith("recall@") or name in ("r_precision", "map@r")
    }


def model_card(config: Config, result: Mapping[str, Any], name: str) -> str:
    """result: of result.json; empty if the run has none."""
    dataset = DATASETS.get(config.data.dataset, config.data.dataset)
    scores = measured(result)
    head: dict[str, Any] = {
        "library_name": "pytorch",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["metric-learning", "image-retrieval", "embeddings", "dml"],
    }
    if scores:
        metrics = [{"type": each, "value": value} for each, value in scores.items()]
        where = {"name": dataset, "type": config.data.dataset, "split": "test"}
        task = {"type": "image-retrieval"}
        entry = {"task": task, "dataset": where, "metrics": metrics}
        head["model-index"] = [{"name": name, "results": [entry]}]
    untrained = measured(result.get("untrained") or {})
    table = ["| score | trained | untrained |", "|---|--:|--:|"]
    for each, value in scores.items():
        before = f"{untrained[each]:.1%}" if each in untrained else ""
        table.append(f"| {each} | {value:.1%} | {before} |")
    flat = flatten(config)
    recipe = [f"| {key} | {value} |" for key, value in flat.items() if key.split(".")[0] in RECIPE]
    return CARD_TEXT.format(
        head=yaml.safe_dump(head, sort_keys=False).strip(),
        name=name,
        size=config.model.embedding_size,
        backbone=config.model.backbone,
        dataset=dataset,
        scores="\n".join(table) if scores else "The run has no result.json.",
        steps=f"{result['step']:,} steps, {result['images']:,} images" if "step" in result else "",
        recipe="\n".join(["| key | value |", "|---|---|", *recipe]),
        version=__version__,
    )


RECIPE = ("batch", "model", "loss", "optim", "length")
CARD_TEXT = """---
{head}
---

# {name}

The network {backbone}, which embeds images as unit vectors of {size} dimensions, trained by deep metric learning
with dml {version}. The dot product of two embeddings is the similarity of their images.

```python
import torch
from model import Model
from preprocess import load_image

model = Model()
images = torch.stack([torch.from_numpy(load_image(open(path, "rb").read()).copy()) for path in paths])
X = model(images)  # similarities: X @ X.T
```

## Data

Trained on the training classes of {dataset}; scored on classes that it was not trained on.

## Scores

{scores}

## Recipe

{steps}

{recipe}

`training.yaml` has every key.
"""
