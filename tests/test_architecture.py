"""The house: imports point only down, and no module hides one of the standard library or torch."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("dml", "launch", "shards")

# The rooms from the ground up: a module imports modules of its own room or of rooms below.
ROOMS = [
    "shards",
    # what all rooms share
    "dml.rules",
    "dml.errors",
    "dml.catalogue",
    "dml.config",
    "dml.cost",
    "dml.measuring",
    "dml.plan",
    # the rooms
    "dml.distributed",
    "dml.recall",
    "dml.gpw",
    "dml.data",
    "dml.models",
    "dml.run_folder",
    "dml.inference",
    # one update, one evaluation
    "dml.optim",
    "dml.step",
    "dml.evaluate",
    # the story with what it is about, and the programs
    "dml.running",
    "dml.training",
    "dml.train",
    "dml.embed",
    "dml.search",
    "dml.look",
    "dml.export",
    "launch",
    "dml.gpu_check",
    # the command that starts them all
    "dml.cli",
]
# What a room may use of the others, where that is less than all that lies below. The planner is not
# for the mathematics, the loader not for models; shards offer an index and a reader of images.
ONLY = {
    "dml.gpw": {
        *("dml.catalogue", "dml.cost", "dml.errors"),
        *("dml.distributed.collectives", "dml.distributed.precision"),
    },
    "dml.models": {
        *("dml.config", "dml.errors", "dml.distributed.precision"),
        *("dml.data.preprocessing", "dml.data.vectors", "dml.data.pair"),
    },
    "dml": {
        "shards.index",
        "shards.cache",
        "shards.checksums",
        "shards.fetcher",
        "shards.remote",
        "shards.item",
        "shards.files",
        "shards.cores",
        "shards.output",
        "shards.photo",
        "shards.vector",
        "shards.workers",
    },
    "launch": {
        *("dml.rules", "dml.errors", "dml.catalogue", "dml.config", "dml.plan"),
        "dml.train",
        *("dml.run_folder.files", "dml.run_folder.folder", "dml.distributed.signals"),
    },
}
# Inside the mathematics: what is computed knows nothing of how.
WITHOUT = {
    "dml.gpw.losses": "dml.gpw.engine",
    "dml.gpw.weighting": "dml.gpw.engine",
    "dml.gpw.statistics": "dml.gpw.engine",
    "dml.gpw.reference": "dml.gpw.engine",
}
# A login node has no torch, or cannot spare the seconds it takes to import.
TORCH_FREE = [
    *(
        "dml.train",
        "dml.embed",
        "dml.search",
        "dml.inference.make_index",
        "dml.look.program",
        "dml.export.program",
        "dml.config",
        "dml.plan",
        "dml.cost",
        "dml.catalogue",
    ),
    *("dml.run_folder.files", "dml.run_folder.folder", "dml.data.sources"),
    *("launch.slurm", "launch.job", "launch.local", "launch.report"),
    *("dml.cli.main", "dml.cli.train", "dml.cli.demo", "dml.cli.doctor"),
    *("shards.index", "shards.build", "shards.verify", "shards.index_tars", "shards.fetcher"),
]


def modules():
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())
PACKAGES = [name for name, path in MODULES.items() if path.stem == "__init__" and "." in name]


def imports(path):
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full, not relative"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def ours(path):
    return {name for name in imports(path) if name.split(".")[0] in OURS and name not in OURS}


def within(name, room):
    return name == room or name.startswith(f"{room}.")


def room_of(name):
    """The number of a module's room; the package `dml` itself holds nothing."""
    found = [i for i, room in enumerate(ROOMS) if within(name, room)]
    assert len(found) == 1, f"{name} stands in no room; give it one"
    return found[0]


def upward(name, path):
    return sorted(target for target in ours(path) if room_of(target) > room_of(name))


def beyond(name, path):
    """What a module imports that its room may not use."""
    return sorted(
        target
        for room, allowed in ONLY.items()
        if within(name, room)
        for target in ours(path)
        if target.split(".")[0] in {each.split(".")[0] for each in allowed}
        and not within(target, room)
        and not any(within(target, each) for each in allowed)
    )


NAMES = sorted(set(MODULES) - set(OURS))


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name):
    assert upward(name, MODULES[name]) == []
    assert beyond(name, MODULES[name]) == []


@pytest.mark.parametrize(("name", "other"), WITHOUT.items())
def test_what_is_computed_knows_nothing_of_how(name, other):
    inside = [path for module, path in MODULES.items() if within(module, name)]
    assert inside
    assert not [target for path in inside for target in ours(path) if within(target, other)]


def test_no_circle():
    """Also inside a room."""
    graph = {name: ours(path) - {name} for name, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())


def test_the_step_needs_no_tensorboard():
    """A clock is a clock."""
    seen, todo = set(), ["dml.step"]
    while todo:
        name = todo.pop()
        targets = set(imports(MODULES[name]))
        assert not any("tensorboard" in target for target in targets), name
        todo += [t for t in targets if t in MODULES and t not in seen]
        seen |= targets


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_login_node_needs_no_torch(name):
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("shards")])
def test_shards_know_nothing_of_dml(name):
    assert not any(t.split(".")[0] in ("dml", "launch") for t in imports(MODULES[name]))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_room_says_what_is_in_it(name):
    """One sentence on the door, then every module, with names that exist."""
    doc = MODULES[name].read_text().split('"""')[1]
    sentence, *_ = doc.split("\n\n")
    assert sentence.rstrip().endswith("."), "the first paragraph is a sentence"
    listed = dict(re.findall(r"^- `(\w+)`(?: \(([\w, \n]+?)\))?:", doc, re.MULTILINE))
    inside = {n.rpartition(".")[2] for n in MODULES if n.rpartition(".")[0] == name}
    assert set(listed) == inside - {"__main__"}
    for module, names in listed.items():
        for public in re.findall(r"\w+", names):
            assert hasattr(import_module(f"{name}.{module}"), public), f"{name}.{module}.{public}"


def test_the_top_of_dml_is_small():
    top = [name for name in MODULES if re.fullmatch(r"dml\.\w+", name) and name not in PACKAGES]
    assert len(top) <= 14


def test_no_module_hides_another():
    """`python dml/train.py` puts dml/ first on the path: a dml/logging.py would break torch."""
    taken = set(sys.stdlib_module_names) | (set(packages_distributions()) - set(OURS))
    first = {name: name.split(".")[1] for name in NAMES if name.count(".") == 1}
    assert {full for full, last in first.items() if last in taken} == set()


def test_functions_and_files_are_short():
    for name, path in MODULES.items():
        text = path.read_text()
        most = 150 if name == "dml.training" else 400
        assert text.count("\n") <= most, f"{name} is longer than {most} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{name}.{node.name} is too long"


def test_the_rules_see_a_breach(tmp_path):
    """The tests above can fail: an upward import, an inner one, a relative one, one of a planner."""
    file = tmp_path / "plan.py"
    file.write_text("def f():\n    from dml.gpw import make_loss\n    import dml.config.loading\n")
    assert upward("dml.plan", file) == ["dml.gpw"]
    file.write_text("from dml.plan import plan\n")
    assert beyond("dml.gpw.losses", file) == ["dml.plan"]
    file.write_text("from dml.data.loader import loader\nfrom dml.data import preprocessing\n")
    assert beyond("dml.models.embedder", file) == ["dml.data.loader"]
    file.write_text("from . import gpw\n")
    with pytest.raises(AssertionError, match="in full"):
        upward("dml.plan", file)
