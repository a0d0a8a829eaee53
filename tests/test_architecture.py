"""The house: imports point only down, and no module hides one of the standard library or torch."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("dml", "launch", "shards")

# A module imports modules of lower layers, or of its own package in the order listed here.
LAYERS = [
    # L0: words and numbers
    [
        "shards.item",
        "shards.index",
        "dml.images",
        "dml.catalogue",
        "dml.config",
        "dml.plan",
        "dml.schedule",
        "dml.collectives",
        "dml.precision",
        "dml.heap",
        "dml.recall",
        "dml.deck",
        "dml.gpw.algebra",
    ],
    # L1: the mathematics
    [
        "dml.gpw.pair_loss",
        "dml.gpw.losses",
        "dml.gpw.batch",
        "dml.gpw.tiles",
        "dml.gpw.dense",
        "dml.gpw.fused",
        "dml.gpw.rows",
        "dml.gpw.symmetric",
        "dml.gpw.whole",
        "dml.gpw.triton_ms",
        "dml.gpw.streaming",
        "dml.gpw.pairs",
        "dml.gpw",
        "dml.gpw.table",
    ],
    # L1: what to run
    ["launch.sweep"],
    # L1: reading datasets and writing shards
    [
        "shards.images",
        "shards.workers",
        "shards.pack",
        "shards.sources.layout",
        "shards.sources.sop",
        "shards.sources.cub200",
        "shards.sources.cars196",
        "shards.sources.inshop",
        "shards.sources.folder",
        "shards.sources.icons_names",
        "shards.sources.icons_drawing",
        "shards.sources.icons_package",
        "shards.sources.icons_twins",
        "shards.sources.icons",
        "shards.sources.icons_mini",
    ],
    # L2: parts with state or I/O
    [
        "dml.processes",
        "dml.interrupt",
        "dml.data",
        "dml.models.backbone",
        "dml.models.bn_inception",
        "dml.models.convnet",
        "dml.models.efficientnet_lite",
        "dml.models.resnet50",
        "dml.models.timm_backbone",
        "dml.models.embedder",
        "dml.models.weights",
        "dml.models",
        "dml.optimizer",
        "dml.engine_state",
        "dml.checkpoint",
        "dml.runs",
        "dml.embedded",
        "dml.trained",
        "dml.picture",
        "dml.journal",
    ],
    # L3: one update, one evaluation, one save
    ["dml.step", "dml.evaluate", "dml.progress"],
    # L4: programs
    [
        "dml.train",
        "dml.embed",
        "dml.search",
        "launch.outcome",
        "launch.job",
        "launch.submission",
        "launch.status",
        "launch.local",
        "launch.slurm",
        "launch.plots",
        "launch.records",
        "launch.paper",
        "launch.tables",
        "launch.page",
        "launch.report",
        "shards.build",
        "shards.verify",
        "shards.sheet",
        "shards.attribution",
    ],
]
RANK = {name: (i, j) for i, layer in enumerate(LAYERS) for j, name in enumerate(layer)}
TORCH_FREE = {
    "dml",
    "dml.catalogue",
    "dml.config",
    "dml.plan",
    "dml.schedule",
    "dml.images",
    "launch.sweep",
    "launch.plots",
    "launch.records",
    "launch.paper",
    "launch.tables",
    "launch.page",
    "launch.report",
    "shards.item",
    "shards.index",
}


def modules():
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path, known):
    """Every module a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full, not relative"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def upward(name, path, known):
    return [
        target
        for target in imports(path, known)
        if target.split(".")[0] in OURS and target != "dml" and RANK[target] >= RANK[name]
    ]


MODULES = dict(modules())


def test_every_module_has_its_place():
    assert set(MODULES) - {*OURS, "shards.sources"} == set(RANK), "give a new module its layer"


@pytest.mark.parametrize("name", RANK)
def test_imports_point_down(name):
    assert upward(name, MODULES[name], MODULES) == []


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_what_a_login_node_runs_imports_no_torch(name):
    targets = set(imports(MODULES[name], MODULES))
    assert "torch" not in {t.split(".")[0] for t in targets}
    assert {t for t in targets if t.split(".")[0] in OURS} <= TORCH_FREE


@pytest.mark.parametrize("name", [name for name in RANK if name.startswith("shards")])
def test_shards_know_nothing_of_dml(name):
    assert not any(t.split(".")[0] in ("dml", "launch") for t in imports(MODULES[name], MODULES))


def test_no_module_hides_another():
    """`python dml/train.py` puts dml/ first on the path: a dml/logging.py would break torch."""
    taken = set(sys.stdlib_module_names) | (set(packages_distributions()) - set(OURS))
    names = {name: name.rsplit(".", 1)[-1] for name in MODULES if name not in OURS}
    assert {full for full, last in names.items() if last in taken} == set()


def test_the_rules_see_a_breach(tmp_path):
    """The tests above can fail: an upward import, an inner one, a relative one."""
    file = tmp_path / "plan.py"
    file.write_text("def f():\n    from dml.gpw import make_loss\n    import dml.config\n")
    assert upward("dml.config", file, MODULES) == ["dml.gpw", "dml.config"]
    file.write_text("from . import gpw\n")
    with pytest.raises(AssertionError, match="in full"):
        upward("dml.plan", file, MODULES)
