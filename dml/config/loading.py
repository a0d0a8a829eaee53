"""Reads YAML files and --set into a Config, and reports all problems at once.

    defaults  <-  files a file `extends`  <-  the file  <-  the next file  <-  --set

Sections merge key by key, with two exceptions. A layer that mentions `length` replaces the whole
section, which holds exactly one of three keys. A layer with another `loss.name` discards the
parameters of the loss before it, which mean nothing to the new one.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dml.catalogue import DATASETS, complete_loss
from dml.config.packaged import CONFIGS, find_config, find_shards, packaged_config
from dml.config.remembering import idle_keys
from dml.config.sections import SECTIONS, Batch, Config, Data, Loss, Model
from dml.config.synonyms import suggestion
from dml.config.towers import contradictions_of_towers
from dml.config.yaml12 import dump, parse, read_yaml
from dml.errors import ConfigError
from dml.rules import ANY, Problem, Rule, did_you_mean, fit, one_of, unknown_keys
from shards.item import escaped

MOST_FILES = 100  # that a config reads; a file that is extended twice counts twice


@dataclass(frozen=True)
class _Layer:
    """The settings of one file, or of all --set together: section -> key -> value."""

    source: str
    sections: Mapping[str, Mapping[str, object]]


# section -> key -> (value, its source)
_Merged = dict[str, dict[str, tuple[object, str]]]


class _TooManyFiles(Exception):
    """The files extend each other too often: their number may be exponential in the depth."""


def _read_file(
    path: Path, chain: tuple[Path, ...], problems: list[Problem], files: list[Path]
) -> list[_Layer]:
    """The layers of a file: those of the files it extends, then its own. files: all that were read
    so far."""
    files.append(path)
    if len(files) > MOST_FILES:
        raise _TooManyFiles
    fix = f"a config is a YAML file of sections ({', '.join(SECTIONS)})"
    try:
        if path.resolve() in chain:
            fix = "remove one of these extends"
            raise ValueError("extends itself, directly or through other files")
        tree = read_yaml(path)
        if tree is None:
            raise ValueError("is empty")
        if not isinstance(tree, dict):
            raise TypeError("is not a mapping of sections")
        extends = tree.pop("extends", [])
        bases = extends if isinstance(extends, list) else [extends]
        if not all(isinstance(base, str) for base in bases):
            raise ValueError("extends must be a path or a list of paths")
    except OSError as error:
        packaged = [file.stem for file in CONFIGS.glob("*.yaml")]
        fix = f"{did_you_mean(path.stem, packaged)}check the path"
        problems.append(Problem(str(path.absolute()), None, str(error.strerror), fix))
        return []
    except (TypeError, ValueError, RuntimeError) as error:
        problems.append(Problem(str(path), None, str(error), fix))
        return []
    layers, sections = [], {}
    for base in bases:
        # normpath keeps messages short: configs/sop.yaml, not configs/presets/../sop.yaml
        beside = Path(os.path.normpath(path.parent / base))
        where = beside if os.path.isfile(beside) else packaged_config(Path(base)) or beside
        layers += _read_file(where, (*chain, path.resolve()), problems, files)

    def unknown(name: object, section: object) -> Problem:
        fix = f"{suggestion(name, SECTIONS)}the sections are {', '.join(SECTIONS)}"
        return Problem(str(name), section, "unknown section", fix, str(path))

    problems += unknown_keys(tree, SECTIONS, unknown)
    for name, section in tree.items():
        if name not in SECTIONS:
            continue
        if isinstance(section, dict):
            sections[name] = {str(key): value for key, value in section.items()}
        else:
            fix = f"write {name}: {{key: value}}, or remove it"
            problems.append(Problem(name, section, "must be a mapping", fix, str(path)))
    return [*layers, _Layer(str(path), sections)]


def _read_sets(sets: Iterable[str], problems: list[Problem]) -> _Layer:
    sections: dict[str, dict[str, object]] = {}
    elsewhere: dict[str, object] = {}
    for text in sets:
        path, equals, value = text.partition("=")
        section, _, key = path.partition(".")
        if not (equals and key):
            fix = f"{suggestion(path) if not key else ''}for example --set batch.classes=16"
            problems.append(
                Problem(f"--set {escaped(text)}", None, "must be section.key=value", fix)
            )
        elif section not in SECTIONS:
            elsewhere[path] = value
        else:
            try:
                sections.setdefault(section, {})[key] = parse(value)
            except ValueError as error:
                problems.append(Problem(path, value, str(error), "quote the value", "--set"))

    def unknown(path: str, value: object) -> Problem:
        section = did_you_mean(path.partition(".")[0], SECTIONS) or suggestion(path)
        fix = f"{section}the sections are {', '.join(SECTIONS)}"
        return Problem(path, value, "unknown section", fix, "--set")

    problems += unknown_keys(elsewhere, (), unknown)
    return _Layer("--set", sections)


def _overlay(layers: Iterable[_Layer]) -> _Merged:
    merged: _Merged = {name: {} for name in SECTIONS}
    for layer in layers:
        for name, section in layer.sections.items():
            before, _ = merged["loss"].get("name", (Loss.name, ""))
            if name == "length" or (name == "loss" and section.get("name", before) != before):
                merged[name] = {}
            merged[name] |= {key: (value, layer.source) for key, value in section.items()}
    return merged


def kinds_of(hint: Any) -> list[Any]:
    """What a value may be, apart from None: the members of a union, or else the hint alone."""
    union = get_origin(hint) in (Union, UnionType)
    return [kind for kind in (get_args(hint) if union else (hint,)) if kind is not type(None)]


def _fit(value: object, kinds: Sequence[Any], rule: Rule) -> Any:
    """The value as the first kind that it fits, or ValueError with what the first kind must be."""
    errors = []
    for kind in kinds:
        try:
            return fit(value, kind, rule)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


_hints = cache(get_type_hints)  # a fifth of the time of loading a config


def _read_section(name: str, given: Mapping[str, object], problems: list[Problem]) -> Any:
    """The section as its dataclass, or None if it has problems."""
    section, known = SECTIONS[name], len(problems)
    hints, settings = _hints(section), {f.name: f for f in fields(section)}

    def unknown(key: str, value: object) -> Problem:
        close = suggestion(f"{name}.{key}", settings, f"{name}.")
        fix = f"{close}{name} has {', '.join(settings)}"
        return Problem(f"{name}.{key}", value, "unknown key", fix)

    problems += unknown_keys(given, settings, unknown)
    values: dict[str, object] = {}
    for key, f in settings.items():
        path, example = f"{name}.{key}", f.metadata.get("example")
        fix = f"for example {path}={example}" if example else f"the default is {f.default}"
        kinds, rule = kinds_of(hints[key]), f.metadata.get("rule", ANY)
        optional = type(None) in get_args(hints[key])
        if get_origin(kinds[0]) is Literal:
            kinds, rule = [str], one_of(get_args(kinds[0]))
        if key not in given:
            if f.default is MISSING:
                problems.append(Problem(path, None, "is required", fix))
        elif given[key] is None and optional:
            values[key] = None
        else:
            try:
                values[key] = _fit(given[key], kinds, rule)
            except ValueError as error:
                fix = did_you_mean(given[key], rule.choices).strip() or fix
                text = f"{error}, or null" if optional else str(error)
                problems.append(Problem(path, given[key], text, fix))
    return section(**values) if len(problems) == known else None


def _read_loss(given: Mapping[str, object], problems: list[Problem]) -> Loss | None:
    name = given.get("name", Loss.name)
    rest = {key: value for key, value in given.items() if key != "name"}
    parameters, wrong = complete_loss(name, rest)
    problems += [replace(problem, key=f"loss.{problem.key}") for problem in wrong]
    return None if wrong else Loss(name=str(name), pairs=tuple(parameters.items()))


def _contradictions(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of several keys together; a section that has problems already is None."""
    optim, length, evaluation = (sections[name] for name in ("optim", "length", "eval"))
    loss, model = sections["loss"], sections["model"]
    dim = loss.parameters.get("dim") if loss else None
    if model and dim is not None and dim != model.embedding_size:
        text = f"must be model.embedding_size, which is {model.embedding_size}"
        yield Problem("loss.dim", dim, text, "drop loss.dim")
    if optim and optim.milestones and optim.schedule != "step":
        text = f"has no effect with schedule {optim.schedule}"
        fix = "set optim.schedule=step or optim.milestones=[]"
        yield Problem("optim.milestones", list(optim.milestones), text, fix)
    if optim and optim.schedule == "step" and not optim.milestones:
        fix = "for example optim.milestones=[1200, 2400]"
        yield Problem("optim.schedule", "step", "needs optim.milestones", fix)
    if length:
        given = {key: value for key, value in asdict(length).items() if value is not None}
        if len(given) != 1:
            text = "must have exactly one of steps, epochs, images"
            yield Problem("length", given or None, text, "for example length.steps=3000")
    if evaluation and evaluation.validation_classes and not evaluation.every_steps:
        text = "without eval.every_steps there is nothing to choose by the held-out classes"
        fix = "for example eval.every_steps=500, or eval.validation_classes=0"
        yield Problem("eval.validation_classes", evaluation.validation_classes, text, fix)
    if evaluation and not evaluation.test and not evaluation.validation_classes:
        text = "neither test nor held-out classes would be evaluated"
        fix = "for example eval.validation_classes=0.2, or eval.test=true"
        yield Problem("eval.test", False, text, fix)
    if evaluation and not evaluation.test and evaluation.untrained:
        text = "evaluates the test classes, and eval.test is false"
        yield Problem("eval.untrained", True, text, "set eval.untrained=false or eval.test=true")
    if evaluation and evaluation.patience and not evaluation.validation_classes:
        text = "no classes are held out to tell when training stops improving"
        fix = "for example eval.validation_classes=0.1, or eval.patience=null"
        yield Problem("eval.patience", evaluation.patience, text, fix)
    if sections["memory"]:
        yield from idle_keys(sections["memory"])
    if sections["towers"]:
        batch, data = sections["batch"], sections["data"]
        of_others = batch and batch.per_class, model and model.backbone, data and len(data.folders)
        yield from contradictions_of_towers(sections["towers"], *of_others)
    if sections["data"]:
        yield from _contradictions_of_servers(sections["data"])
    yield from _contradictions_of_data(sections["data"], sections["batch"], sections["model"])


def _contradictions_of_servers(data: Data) -> Iterator[Problem]:
    if data.cache is None:
        for name, idle in (("cache_gib", None), ("remote", "cache")):
            value, fix = getattr(data, name), "set data.cache to a folder of this machine"
            if value != idle:
                yield Problem(f"data.{name}", value, "needs data.cache", fix)
    if data.remote == "range" and data.verify:
        text = "shards that are read image by image cannot be compared as a whole"
        yield Problem("data.verify", True, text, "set data.verify=false: every image is compared")


def _contradictions_of_data(
    data: Data | None, batch: Batch | None, model: Model | None
) -> Iterator[Problem]:
    if data and data.weights and len(data.weights) != len(data.folders):
        text = f"must have a number for each of the {len(data.folders)} folders of data.shards"
        yield Problem("data.weights", list(data.weights), text, "or set data.weights=null")
    if batch and batch.mixed and not batch.group:
        text, fix = (
            "has no effect without batch.group",
            "set batch.group=super_class or batch.mixed=0",
        )
        yield Problem("batch.mixed", batch.mixed, text, fix)
    if model and model.head == "mlp" and not model.hidden:
        fix = "for example model.hidden=[1024], or model.head=linear"
        yield Problem("model.head", model.head, "needs model.hidden", fix)
    if model and model.head == "linear" and model.hidden:
        fix = "set model.head=mlp or model.hidden=[]"
        yield Problem("model.hidden", list(model.hidden), "has no effect with head linear", fix)
    if model and model.backbone == "none":
        if model.weights == "pretrained":
            text, fix = "there is no backbone to have weights", "set model.weights=null"
            yield Problem("model.weights", model.weights, text, fix)
        if model.checkpointing:
            text, fix = "there is no backbone to save memory in", "set model.checkpointing=false"
            yield Problem("model.checkpointing", model.checkpointing, text, fix)
        for key in ("size", "resize"):
            if data and getattr(data, key) is not None:
                text = "is for images, but model.backbone=none takes features"
                yield Problem(f"data.{key}", getattr(data, key), text, f"set data.{key}=null")


def _source(path: str, merged: _Merged) -> str | None:
    name, _, key = path.partition(".")
    given = [source for k, (_, source) in merged[name].items() if key in ("", k)]
    return ", ".join(dict.fromkeys(given)) or None


def load(paths: str | Path | Sequence[str | Path], sets: Sequence[str] = ()) -> Config:
    """The config of files overlaid in order, and then of --set; ConfigError lists every problem."""
    paths = [paths] if isinstance(paths, str | Path) else paths
    where = ", ".join(map(str, paths)) or "the command line"
    problems: list[Problem] = []
    files: list[Path] = []
    try:
        found_at = [find_config(Path(path)) for path in paths]
        layers = [layer for path in found_at for layer in _read_file(path, (), problems, files)]
    except _TooManyFiles:
        fix = "a file that is extended twice is read twice; extend it once"
        problem = Problem("extends", None, f"more than {MOST_FILES} files are read", fix)
        raise ConfigError([problem], where) from None
    unread = any(problem.source is None for problem in problems)
    merged = _overlay([*layers, _read_sets(sets, problems)])
    if unread:  # settings of a file that was not read must not be reported as missing
        raise ConfigError(problems, where)

    values = {name: {k: v for k, (v, _) in given.items()} for name, given in merged.items()}
    dataset = values["data"].get("dataset")
    ks = DATASETS[dataset].ks if isinstance(dataset, str) and dataset in DATASETS else (1,)
    values["eval"].setdefault("ks", list(ks))
    size = values["model"].get("embedding_size", Model.embedding_size)
    if values["loss"].get("name") == "margin" and type(size) is int:  # others have no dim
        values["loss"].setdefault("dim", size)

    found: list[Problem] = []
    sections: dict[str, Any] = {
        name: _read_loss(given, found) if name == "loss" else _read_section(name, given, found)
        for name, given in values.items()
    }
    found += _contradictions(sections)
    problems += [replace(problem, source=_source(problem.key, merged)) for problem in found]
    if problems:
        raise ConfigError(problems, where)
    data = sections["data"]
    folders = tuple(map(find_shards, data.folders))
    shards = folders[0] if isinstance(data.shards, str) else folders
    sections["data"] = replace(data, shards=shards)
    return Config(**sections)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The complete config in plain values; loading them gives an equal config."""
    tree: dict[str, dict[str, Any]] = asdict(config)
    tree["loss"] = {"name": config.loss.name, **config.loss.parameters}
    return {
        name: {key: list(v) if isinstance(v, tuple) else v for key, v in section.items()}
        for name, section in tree.items()
    }


def flatten(config: Config) -> dict[str, Any]:
    """section.key -> value."""
    return {
        f"{section}.{key}": value
        for section, values in to_dict(config).items()
        for key, value in values.items()
    }


def to_yaml(config: Config) -> str:
    """The text of a run's config.yaml."""
    return dump(to_dict(config))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --config and --set, with the same help in every program."""
    parser.add_argument(
        "--config", nargs="+", required=True, metavar="FILE", help="YAML files; later ones overlay"
    )
    add_set(parser, "overlay single values last, for example --set loss.beta=40 length.steps=50")


def add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="SECTION.KEY=VALUE", help=text
    )
