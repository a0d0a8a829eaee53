"""The page docs/config.md, made from the sections and the catalogue: every key with its rule."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dml.catalogue import (
    DATASETS,
    LOSS_PARAMETERS,
    MINING,
    MINING_SETTLED,
    PARAMETER_MEANINGS,
    PARAMETER_RULES,
    kind_of,
)
from dml.config.loading import kinds_of
from dml.config.sections import SECTIONS, Loss

TYPES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple[int, ...]: "list of whole numbers",
    tuple[float, ...]: "list of numbers",
    tuple[str, ...]: "list of texts",
}
HEAD = """\
# The config: every key

This page is the output of `python -m dml.config`; a test compares them. Change the text in
`dml/config/sections.py` or `dml/catalogue.py`, then, after `source .venv/bin/activate`, write the page again:

```bash
python -m dml.config > docs/config.md
```

A config is a YAML file with the sections below. Keys that are marked **may change** say how a run is
carried out and not what it learns: they may differ when a run is resumed, as may the number of
processes, and a report ignores them. With `optim.schedule` `constant` or `step` the `length` may also be
larger, which trains a finished run longer; with `cosine` it may not, because the learning rate of every step
depends on it. Every other key must be the same, or the run is refused. All mistakes in a config are reported
together.

## How files and --set are merged

    defaults  <-  the files a file extends  <-  the file  <-  the next file  <-  --set

- `extends: base.yaml`, or a list, names files to start from, relative to the file that names them.
- `--config a.yaml b.yaml` overlays b on a; `--set optim.lr=1e-4 length.steps=500` comes last. A value
  is read as YAML 1.2, so `null`, `true`, `1e-4` and `[1, 10]` mean what they say.
- Sections merge key by key, with two exceptions. Naming any key of `length` replaces the whole section,
  since it holds exactly one key. Another `loss.name` discards the parameters given before, since they
  belong to another loss.

`python -m dml.plan --config FILE` checks a config and prints every number that follows from it. A run
keeps its complete config in `config.yaml`, which can be given to `--config` again.
"""
LOSS = """\
`loss.name` is text, by default `{default}`. The other keys depend on it:

{losses}

{parameters}

`multi_similarity` and `ms_mining` always mine and `ms_weighting` never does; for the others `mine` is
false by default, and `eps` is allowed with `mine: true` only. The defaults of `beta` and `lam` are those of the
authors' public code, also in `configs/presets/authors.yaml`; `configs/presets/paper.yaml` has those of the paper's
text. From pretrained weights the first trains and the second stalls ([log.md](log.md)). The equations stand in
[losses.md](losses.md).
"""


def reference() -> str:
    """The text of docs/config.md."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        doc = " ".join((getdoc(section) or "").split())
        parts.append(f"## {name}\n\n{doc}\n\n{loss() if section is Loss else keys(name, section)}")
    parts.append(f"## Datasets\n\n{datasets()}")
    return "\n".join(parts)


def keys(name: str, section: Any) -> str:
    hints = get_type_hints(section)
    return table(
        ("key", "type", "default", "rule", "on resume", "meaning"),
        (
            (
                f"`{name}.{f.name}`",
                type_of(hints[f.name]),
                default_of(name, f),
                rule_of(hints[f.name], f),
                "may change" if f.metadata["execution"] else "",
                f.metadata["meaning"],
            )
            for f in fields(section)
        ),
    )


def type_of(hint: Any) -> str:
    kinds = [str if get_origin(kind) is Literal else kind for kind in kinds_of(hint)]
    null = ["null"] * (type(None) in get_args(hint))
    return " or ".join([TYPES[kind] for kind in kinds] + null)


def default_of(name: str, f: "Field[Any]") -> str:
    if f"{name}.{f.name}" == "eval.ks":
        return "the dataset's"
    return "required" if f.default is MISSING else f"`{as_yaml(f.default)}`"


def rule_of(hint: Any, f: "Field[Any]") -> str:
    kind = kinds_of(hint)[0]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(kind))
    text: str = f.metadata["rule"].text
    return text


def as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def loss() -> str:
    losses = (
        (
            f"`{name}`",
            ", ".join(f"`{key}: {as_yaml(value)}`" for key, value in loss_defaults(name)),
        )
        for name in LOSS_PARAMETERS
    )
    parameters = (
        (f"`loss.{name}`", type_of(kind_of(a_default(name))), rule.text, PARAMETER_MEANINGS[name])
        for name, rule in PARAMETER_RULES.items()
    )
    return LOSS.format(
        default=Loss.name,
        losses=table(("loss.name", "parameters and defaults"), losses).rstrip(),
        parameters=table(("key", "type", "rule", "meaning"), parameters).rstrip(),
    )


def loss_defaults(name: str) -> Iterator[tuple[str, Any]]:
    yield from LOSS_PARAMETERS[name].items()
    if name not in MINING_SETTLED:
        yield from MINING.items()


def a_default(parameter: str) -> Any:
    """The parameter's default in one of the losses that have it."""
    known = (dict(loss_defaults(name)) for name in LOSS_PARAMETERS)
    return next(each[parameter] for each in known if parameter in each)


def datasets() -> str:
    """What the catalogue knows of each dataset."""
    return table(
        ("data.dataset", "training classes", "training images", "default of eval.ks"),
        (
            (
                f"`{name}`",
                *map(count, (each.train_classes, each.train_images)),
                f"`{as_yaml(each.ks)}`",
            )
            for name, each in DATASETS.items()
        ),
    )


def count(number: int | None) -> str:
    return "as built" if number is None else f"{number:,}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
