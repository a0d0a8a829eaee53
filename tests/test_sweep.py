"""Oracle: small sweeps expanded by hand. The shipped sweeps are checked in tests/test_configs.py, too."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dml.config import load
from launch.resources import KEYS, RESOURCE_HELP, Resources, read_flag
from launch.submission import group_by_resources
from launch.sweep import Sweep, SweepError, choose, plan_all, read_sweep

ROOT = Path(__file__).parents[1]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
BASE = """
data: {dataset: icons, shards: nowhere}
batch: {classes: 16}
model: {backbone: convnet}
length: {steps: 100}
"""


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)

    def read(text: str, sets: tuple[str, ...] = (), base: str = "base: base.yaml\n") -> Sweep:
        path = tmp_path / "study.yaml"
        path.write_text(base + text)
        return read_sweep(path, sets)

    return read


@pytest.fixture
def problems(sweep):
    def read(*args, **kwargs) -> tuple[str, ...]:
        with pytest.raises(SweepError) as caught:
            sweep(*args, **kwargs)
        assert all(problem in str(caught.value) for problem in caught.value.problems)
        return caught.value.problems

    return read


def names(sweep: Sweep) -> list[str]:
    return [run.name for run in sweep.runs]


# ---- expansion ----------------------------------------------------------------------------------


def test_every_combination_in_the_order_of_the_file(sweep):
    found = sweep("""
seeds: [3, 1]
grid:
  batch: {bs40: {batch.classes: 8}, bs20: {batch.classes: 4}}
  model.embedding_size: [64, 32]
""")
    assert found.name == "study"
    assert names(found) == [
        f"{batch}-embedding_size{size}-seed{seed}"
        for batch in ("bs40", "bs20")
        for size in (64, 32)
        for seed in (3, 1)
    ]
    last = found.runs[-1]
    assert (last.name, last.label) == ("bs20-embedding_size32-seed1", "bs20-embedding_size32")
    assert (last.seed, last.config.run.seed) == (1, 1)
    assert (last.config.batch.classes, last.config.model.embedding_size) == (4, 32)
    assert last.config.run.name == last.name


def test_files_and_sets_give_the_config_again(sweep):
    found = sweep("grid: {optim.lr: {slow: 1e-5, fast: 1e-3}, loss.name: [nca, triplet]}")
    assert names(found)[0] == "slow-nca-seed0"
    assert all(load(run.files, run.sets) == run.config for run in found.runs)


def test_no_grid_is_one_run_per_seed(sweep):
    assert names(sweep("seeds: [0, 5]")) == ["seed0", "seed5"]


def test_variants_are_one_more_axis(sweep):
    found = sweep("""
grid: {batch: {bs20: {batch.classes: 4}}}
variants: {plain: {}, mined: {loss.name: nca, loss.mine: true}}
""")
    assert names(found) == ["bs20-plain-seed0", "bs20-mined-seed0"]
    assert found.runs[1].config.loss.name == "nca"


def test_a_later_layer_wins(sweep):
    text = (
        "set: {optim.lr: 1, batch.classes: 2}\ngrid: {a: {x: {optim.lr: 2}}, b: {y: {optim.lr: 3}}}"
    )
    (run,) = sweep(text).runs
    assert (run.config.optim.lr, run.config.batch.classes) == (3, 2)
    (run,) = sweep(text, ("optim.lr=4",)).runs
    assert run.config.optim.lr == 4


def test_a_later_length_or_loss_replaces_the_earlier_one(sweep):
    (run,) = sweep(
        "set: {length.images: 500, loss.name: multi_similarity}\n"
        "grid: {a: {x: {length.steps: 5, loss.name: nca}}}"
    ).runs
    assert (run.config.length.steps, run.config.length.images) == (5, None)
    assert run.config.loss.name == "nca"


@pytest.mark.parametrize("name", ["multi_similarity", "binomial_deviance"])
def test_parameters_of_the_loss_of_the_base_are_kept(sweep, tmp_path, name):
    base = "" if name == "multi_similarity" else f"loss: {{name: {name}, alpha: 3}}\n"
    (tmp_path / "base.yaml").write_text(BASE + base)
    (run,) = sweep(f"set: {{loss.beta: 45}}\ngrid: {{loss.name: [{name}]}}").runs
    assert (run.config.loss.name, run.config.loss.parameters["beta"]) == (name, 45)
    assert run.config.loss.parameters["alpha"] == (3 if base else 2)


def test_parameters_of_a_loss_do_not_vanish_with_it(problems):
    (found,) = problems("set: {loss.beta: 40}\ngrid: {loss.name: [multi_similarity, nca, triplet]}")
    assert found.startswith("nca-seed0 and 1 more: loss.beta = 40: is lost, because a later layer")


def test_runs_of_a_sweep_share_a_folder(sweep):
    assert {run.config.run.dir for run in sweep("seeds: [0, 1]").runs} == {"runs/study"}
    (run,) = sweep("set: {run.dir: else where}").runs
    assert run.config.run.dir == "else where/study"
    (run,) = sweep("", ("run.dir=/tmp/x",)).runs
    assert run.config.run.dir == "/tmp/x/study"


def test_runs_go_where_the_base_says(sweep, tmp_path):
    (tmp_path / "base.yaml").write_text(f"{BASE}\nrun: {{dir: big disk/runs}}\n")
    (run,) = sweep("").runs
    assert run.config.run.dir == "big disk/runs/study"
    (run,) = sweep("set: {run.dir: other}").runs
    assert run.config.run.dir == "other/study"
    (run,) = sweep("set: {loss.name: nca}", ("run.dir=/tmp/x",)).runs
    assert run.config.run.dir == "/tmp/x/study"


def test_labels_that_yaml_would_take_for_numbers(sweep):
    (run,) = sweep("grid: {batch: {1e5: {batch.classes: 4}}}").runs
    assert run.config.run.name == run.name == "100000.0-seed0"


def test_labels_of_awkward_values(sweep):
    found = sweep("grid: {eval.ks: [[1, 2], [1]], run.dir: [a/b, null]}", ("run.dir=runs",))
    assert names(found)[:2] == ["ks-1-2-a-b-seed0", "ks-1-2-dirnull-seed0"]


def test_a_point_overrides_the_resources(sweep):
    found = sweep("""
grid: {batch: {small: {batch.classes: 4, slurm: {nodes: 1}}, large: {}}}
slurm: {nodes: 2, processes_per_node: 8, gpus_per_node: 8, partition: gpu}
""")
    whole = Resources(nodes=2, processes_per_node=8, gpus_per_node=8, partition="gpu")
    assert found.runs[1].resources == whole
    assert found.runs[0].resources == replace(whole, nodes=1)
    assert [run.resources.processes for run in found.runs] == [8, 16]


def test_an_assumed_speed_is_no_resource(sweep):
    """Runs with different ones share a job array."""
    found = sweep("""
grid: {batch: {slow: {slurm: {images_per_second: 5}}, fast: {}}}
slurm: {images_per_second: 400}
""")
    assert [run.resources.images_per_second for run in found.runs] == [5.0, 400.0]
    assert len(group_by_resources(found.runs)) == 1


def test_every_resource_is_explained():
    assert list(RESOURCE_HELP) == list(KEYS)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("nodes", "2", 2),
        ("images_per_second", "400", 400.0),
        ("partition", "7", "7"),
        ("modules", ["cuda/12.4", "gcc"], ("cuda/12.4", "gcc")),
        ("environment", ["A=b=c", "B="], (("A", "b=c"), ("B", ""))),
    ],
)
def test_a_flag(key, text, value):
    found = read_flag(key, text)
    assert (found, type(found)) == (value, type(value))


ACCELERATE = "distributed_type: DEEPSPEED\n"


@pytest.mark.parametrize(
    ("slurm", "problem"),
    [
        ("{modules: cuda}", "modules = 'cuda': must be a list of texts, each printable and"),
        ("{setup: [1]}", "setup = [1]: must be a list of texts"),
        ('{setup: ["a\\nb"]}', "setup = ['a\\nb']: must be a list of texts"),
        ("{environment: [A]}", "environment = ['A']: must be a mapping of names to values"),
        ("{environment: {A: true}}", "the value of A must be printable text or a number; quote it"),
        ("{environment: {a-b: 1}}", "'a-b' is no name of a variable"),
        ("{environment: {RANK: 1}}", "the launcher sets RANK"),
        ("{deepspeed: zero4}", "deepspeed = 'zero4': must be text, one of zero1, zero2, zero3"),
    ],
)
def test_a_wrong_value_for_the_job(problems, slurm, problem):
    (found,) = problems(f"slurm: {slurm}")
    assert problem in found


@pytest.mark.parametrize(
    ("slurm", "problem"),
    [
        (
            "gres: 'gpu:a100:8'",
            "slurm.gres = 'gpu:a100:8': asks for 8 GPUs and gpus_per_node for 2",
        ),
        ("gres: gpu", "slurm.gres = 'gpu': asks for 1 GPUs"),
        ("{gres: 'gpu:2', gpu_type: a100}", "slurm.gpu_type = 'a100': needs gpus_per_node, and no"),
        ("{gpus_per_node: 0, gpu_type: a100}", "slurm.gpu_type = 'a100': needs gpus_per_node"),
        ("gpus_per_node: 1", "slurm.gpus_per_node = 1: must equal processes_per_node, which is 2"),
        (
            "{deepspeed: zero1, accelerate: zero1}",
            "cannot be set beside slurm.deepspeed; remove one",
        ),
        ("accelerate: nowhere.yaml", "nowhere.yaml: No such file or directory; check the path"),
        ("accelerate: text.yaml", "is no config of accelerate; write it with `accelerate config`"),
        (
            "accelerate: fsdp.yaml",
            "has distributed_type FSDP; choose one of NO, MULTI_GPU, DEEPSPEED",
        ),
        ("accelerate: mixed.yaml", "has a mixed_precision; set engine.precision in the config"),
        ("accelerate: more.yaml", "has dynamo_config, which a run does not use; remove it"),
        ("accelerate: bare.yaml", "names the deepspeed_config_file None, which is not there"),
        ("accelerate: lost.yaml", "names the deepspeed_config_file lost.json, which is not there"),
    ],
)
def test_keys_that_do_not_go_together(sweep, slurm, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "text": "hello",
        "fsdp": "distributed_type: FSDP",
        "mixed": f"{ACCELERATE}mixed_precision: bf16",
        "more": f"{ACCELERATE}dynamo_config: {{backend: INDUCTOR}}",
        "bare": ACCELERATE,
        "lost": f"{ACCELERATE}deepspeed_config: {{deepspeed_config_file: lost.json}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    given = yaml.safe_load(slurm)
    needs = {"processes_per_node": 2, "gpus_per_node": 2, **given}
    with pytest.raises(SweepError) as caught:
        plan_all(sweep(f"slurm: {json.dumps(needs)}"))
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_an_accelerate_config_without_deepspeed_changes_nothing(sweep):
    (run,) = sweep("slurm: {accelerate: accelerate/gpu_x8}").runs
    assert run.resources.variables() == {}


def test_deepspeed_uses_the_cores_where_a_run_has_no_gpu(sweep):
    (run,) = sweep("slurm: {accelerate: accelerate/zero3}").runs
    found = run.resources.variables()
    assert found["DS_ACCELERATOR"] == "cpu"
    assert found["ACCELERATE_DEEPSPEED_CONFIG_FILE"].endswith("configs/accelerate/zero3.json")


# ---- choosing runs ------------------------------------------------------------------------------


@pytest.fixture
def six(sweep):
    return sweep("seeds: [0, 1]\ngrid: {a: {bs20: {}, bs1000: {}, bs1000-deep: {optim.lr: 1}}}")


@pytest.mark.parametrize(
    ("only", "found"),
    [
        ([], [f"{label}-seed{i}" for label in ("bs20", "bs1000", "bs1000-deep") for i in (0, 1)]),
        (["bs1000-seed1"], ["bs1000-seed1"]),
        (["bs1000"], ["bs1000-seed0", "bs1000-seed1"]),
        (["bs1000-deep", "bs20-seed1"], ["bs20-seed1", "bs1000-deep-seed0", "bs1000-deep-seed1"]),
        (["bs20", "bs20-seed0"], ["bs20-seed0", "bs20-seed1"]),
    ],
)
def test_chosen_runs_in_the_order_of_the_sweep(six, only, found):
    assert names(choose(six, only)) == found


def test_an_unknown_name_is_refused_with_the_known_ones(six):
    with pytest.raises(SweepError) as caught:
        choose(six, ["bs20", "bs100", "nonsense"])
    (problem,) = caught.value.problems
    assert problem == (
        "--only bs100 nonsense: no such run; did you mean bs1000? the runs are bs20, bs1000, "
        "bs1000-deep, each with -seed0, -seed1"
    )


def test_runs_without_labels_are_chosen_by_their_seed(sweep):
    found = sweep("seeds: [0, 5]")
    assert names(choose(found, ["seed5"])) == ["seed5"]
    with pytest.raises(SweepError, match=r"the runs are seed0, seed5$"):
        choose(found, ["seed1"])


# ---- problems -----------------------------------------------------------------------------------


def test_all_problems_of_all_runs_together(problems):
    found = problems("""
seeds: [0, 1]
grid:
  batch: {bs20: {batch.classes: 4}, none: {batch.classes: 0}}
  lr: {zero: {optim.lr: 0}, typo: {optim.rate: 1}}
slurm: {node: 2}
""")
    starts = (
        "every run: slurm.node = 2: unknown key; did you mean nodes? slurm has nodes, ",
        "bs20-zero-seed0 and 3 more: optim.lr = 0 (--set): must be a finite number, above 0; ",
        "bs20-typo-seed0 and 3 more: optim.rate = 1 (--set): unknown key; optim has name, lr, ",
        "none-zero-seed0 and 3 more: batch.classes = 0 (--set): must be a whole number, ",
    )
    assert len(found) == len(starts)
    assert all(text.startswith(start) for text, start in zip(found, starts, strict=True))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("grids: {}", "grids = {}: unknown key; did you mean grid? "),
        ("seeds: []", "seeds = []: must be a list of different whole numbers, at least 0"),
        ("seeds: [1, 1]", "seeds = [1, 1]: must be a list of different"),
        ("seeds: 3", "seeds = 3: must be a list"),
        ("set: 3", "set: every run = 3: must be a mapping of config keys"),
        ("set: {loss: {beta: 4}}", "--set loss="),
        ("set: {run.name: x}", "run.name = x: the sweep sets it; remove it"),
        ("grid: 3", "grid = 3: must be a mapping"),
        ("grid: {batch: 3}", "batch = 3: must be a list or a mapping of points"),
        ("grid: {batch: []}", "batch = []: must be a list or a mapping of points"),
        ("grid: {batch: [3]}", "batch: batch3 = 3: must be a mapping of config keys"),
        ("grid: {optim.lr: [1, 1]}", "optim.lr = [1, 1]: has a value twice"),
        ("grid: {batch: {a/b: {}}}", "batch = 'a/b': not a label"),
        ("grid: {batch: {../x: {}}}", "batch = '../x': not a label"),
        ("variants: []", "variants = []: must be a mapping"),
        (
            "slurm: {nodes: 0}",
            "slurm.nodes = 0: must be a whole number, at least 1, at most 10,000; the default is 1",
        ),
        ("slurm: {nodes: null}", "slurm.nodes: must be a whole number"),
        ("slurm: {partition: 3}", "slurm.partition = 3: must be text, printable, not empty"),
        (
            "slurm: {images_per_second: 0}",
            "slurm.images_per_second = 0: must be a finite number, ab",
        ),
        ("grid: {a: {x: {slurm: 3}}}", "a: x: slurm = 3: must be a mapping"),
        (
            "grid: {a: {x: {}, x-y: {}}, b: {y-z: {}, z: {}}}",
            "2 runs would be called x-y-z-seed0; change a label",
        ),
    ],
)
def test_a_problem(problems, text, problem):
    (found,) = problems(text)
    assert problem in found


@pytest.mark.parametrize(
    "sets", [("batch.classes",), ("nonsense",), ("run.dir=[",), ("run.name=x",)]
)
def test_problems_of_the_command_line(problems, sets):
    assert len(problems("", sets)) == 1


@pytest.mark.parametrize("base", ["", "base: 3\n", "base: []\n", "base: [3]\n"])
def test_a_base_is_needed(problems, base):
    (found,) = problems("seeds: [0]", base=base)
    assert found.endswith("for example base: ../sop.yaml")


def test_an_absent_base_is_told_once(problems):
    (found,) = problems("seeds: [0, 1]", base="base: absent.yaml\n")
    assert found.startswith("every run: ")
    assert "absent.yaml: No such file or directory" in found


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory; check the path"),
        (b"a: [", "is not YAML"),
        (b"\xff", "not UTF-8"),
        (b"3", "is not a mapping; a sweep has base, seeds, set, grid, variants, tune, slurm"),
        (b"", "is not a mapping"),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path, content, problem):
    path = tmp_path / "study.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SweepError, match=problem):
        read_sweep(path)


# ---- plans --------------------------------------------------------------------------------------


def test_plans_are_for_the_processes_of_each_run(sweep):
    found = sweep("""
grid: {batch: {bs20: {batch.classes: 4, slurm: {nodes: 1}}, bs40: {batch.classes: 8}}}
slurm: {nodes: 2, processes_per_node: 4}
""")
    assert [p.images_per_process for p in plan_all(found)] == [5, 5]


def test_all_problems_of_all_plans_together(sweep):
    found = sweep("""
grid: {batch: {bs20: {batch.classes: 4}, bs40: {batch.classes: 8}, bs60: {batch.classes: 12}}}
slurm: {processes_per_node: 8, gpus_per_node: 4}
""")
    with pytest.raises(SweepError) as caught:
        plan_all(found)
    gpus, bs20, bs60 = caught.value.problems
    assert gpus.startswith("every run: slurm.gpus_per_node = 4: must equal processes_per_node")
    assert bs20.startswith("bs20-seed0: batch.classes = 4: 20 images are not divisible")
    assert bs60.startswith("bs60-seed0: batch.classes = 12: 60 images are not divisible")


# ---- the shipped ones ---------------------------------------------------------------------------

SIZES = {
    "sop_batch_size": (20, 40, 80, 160, 320, 640, 1000),
    "cub200_batch_size": (20, 40, 80, 160, 240),
    "icons_batch_size": (20, 40, 80, 160, 320, 640, 1000),
}


def shipped(name: str) -> Sweep:
    return read_sweep(ROOT / "configs" / "sweeps" / f"{name}.yaml")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_shipped_sweep_plans(path):
    found = read_sweep(path)
    assert len(plan_all(found)) == len(found.runs) > 1


@pytest.mark.parametrize("name", SIZES)
def test_batch_sizes(name):
    plans = plan_all(shipped(name))
    assert tuple(dict.fromkeys(p.batch_size for p in plans)) == SIZES[name]


@pytest.mark.parametrize("study", ["ablation", "embedding_size"])
def test_icons_repeat_the_studies_of_cars196(study):
    ours, cars = shipped(f"icons_{study}"), shipped(f"cars196_{study}")
    assert {run.label for run in ours.runs} == {run.label for run in cars.runs}
    here = {run.label: run.config.loss for run in ours.runs}
    for run in cars.runs:  # the values differ: from random weights the paper's, else the authors'
        loss = run.config.loss
        assert (loss.name, *loss.parameters) == (here[run.label].name, *here[run.label].parameters)
        assert loss.parameters.get("mine") == here[run.label].parameters.get("mine")


def test_the_icons_study_is_fair():
    """Equal images are exactly equal, and evaluations come at equal images."""
    found = shipped("icons_batch_size")
    plans = plan_all(found)
    images: dict[str, set[int]] = {}
    for run, p in zip(found.runs, plans, strict=True):
        images.setdefault(run.label.rpartition("-")[2], set()).add(p.images)
        assert run.config.eval.every_steps is not None
        assert run.config.eval.every_steps * p.batch_size == 16_000
        scaled = 1e-3 * (p.batch_size / 80) ** 0.5
        lr = scaled if "scaled" in run.name else 1e-3
        assert run.config.optim.lr == pytest.approx(lr, rel=2e-3)
    assert {protocol: len(seen) for protocol, seen in images.items()} == {
        "equal_images": 1,
        "to_convergence": 1,
    }


def test_a_login_node_needs_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom launch.sweep import plan_all, read_sweep\n"
        "plan_all(read_sweep('configs/sweeps/sop_batch_size.yaml'))\n"
        "sys.exit(sorted({'torch', 'numpy'} & sys.modules.keys()) != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
