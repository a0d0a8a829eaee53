"""Oracle: the tables of the paper and its supplement, copied here by hand."""

from itertools import takewhile
from pathlib import Path

import pytest

from dml.config import Config, load, to_yaml
from dml.plan import plan

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
OURS = ["icons", "icons_mini"]  # not of the paper, for a CPU
PAPER = [name for name in CONFIGS if name not in OURS]

# Supplement, Tables 1 and 2: batch size -> Recall@1.
SOP = {20: "71.40", 40: "73.82", 80: "75.61", 160: "76.63", 320: "77.59", 640: "78.19"}
SOP[1000] = "78.35"
CUB = {20: "64.75", 40: "65.07", 80: "65.65", 160: "65.43", 240: "64.60"}

# Table 2: row -> loss, whether MS mining goes in front, Recall@1.
ABLATION = {
    "binomial": ("binomial_deviance", False, "71.9"),
    "lifted_star": ("lifted_structure_star", False, "69.7"),
    "ms_mining": ("ms_mining", True, "67.0"),
    "bin_lifted": ("bin_lifted", False, "70.4"),
    "ms_weighting": ("ms_weighting", False, "73.2"),
    "binomial_mined": ("binomial_deviance", True, "74.6"),
    "lifted_star_mined": ("lifted_structure_star", True, "72.2"),
    "ms": ("multi_similarity", True, "77.3"),
}

# Tables 3, 4 and 5, MS at 512 dimensions: Recall@1.
BASES = {"sop": "78.2", "cub200": "65.7", "cars196": "84.1", "inshop": "89.7"}


def path(name: str) -> str:
    return str(ROOT / "configs" / f"{name}.yaml")


def shipped(name: str) -> Config:
    return load([path(name)])


def header(name: str) -> list[str]:
    lines = Path(path(name)).read_text().splitlines()
    return list(takewhile(lambda line: line.startswith("#"), lines))


def batch_size(config: Config) -> int:
    return config.batch.classes * config.batch.per_class


def test_the_shipped_configs_are_those_of_the_studies() -> None:
    assert set(PAPER) == {
        *BASES,
        *(f"sop_bs{size}" for size in SOP),
        *(f"cub200_bs{size}" for size in CUB),
        *(f"cars196_dim{size}" for size in (64, 128, 256, 512, 1024)),
        *(f"cars196_ablation_{row}" for row in ABLATION),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_it_loads_plans_and_round_trips(name: str, tmp_path: Path) -> None:
    config = shipped(name)
    plan(config)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load([tmp_path / "again.yaml"]) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_its_name_is_its_run_and_its_dataset(name: str) -> None:
    config = shipped(name)
    assert config.run.name == name
    assert name.startswith(config.data.dataset)
    bundled = name == "icons_mini"
    built = f"data/{config.data.dataset}"
    assert config.data.shards == ("shards/bundled/icons-mini" if bundled else built)


@pytest.mark.parametrize("name", OURS)
def test_our_own_say_how_they_are_started(name: str) -> None:
    command = "accelerate launch --config_file configs/accelerate/cpu_x2.yaml dml/train.py"
    assert header(name)[0] == f"# {command} --config configs/{name}.yaml"


@pytest.mark.parametrize("name", PAPER)
def test_it_follows_the_paper(name: str) -> None:
    config = shipped(name)
    assert config.batch.per_class == 5
    assert config.model.backbone == "bn_inception"
    assert config.model.batchnorm == "frozen"
    assert config.optim.name == "adam"
    if "ablation" not in name:
        assert config.loss.name == "multi_similarity"
        assert config.loss.parameters == {"alpha": 2, "beta": 50, "lam": 1, "eps": 0.1}
    if "dim" not in name and "ablation" not in name:
        assert config.model.embedding_size == 512


@pytest.mark.parametrize("name", PAPER)
def test_its_header_gives_the_command_the_table_and_what_we_know(name: str) -> None:
    command, source, *rest = header(name)
    assert command == f"# accelerate launch dml/train.py --config configs/{name}.yaml"
    assert source.startswith(("# Paper, Table ", "# Paper, Figure 3", "# Supplement, Table "))
    assert rest[-1] == "# Not yet run on the real dataset by us: the score is the paper's."


@pytest.mark.parametrize(("name", "recall"), BASES.items())
def test_bases(name: str, recall: str) -> None:
    assert f"Recall@1 {recall}" in "\n".join(header(name))


@pytest.mark.parametrize(
    ("dataset", "size", "recall"),
    [("sop", *row) for row in SOP.items()] + [("cub200", *row) for row in CUB.items()],
)
def test_batch_size_study(dataset: str, size: int, recall: str) -> None:
    name = f"{dataset}_bs{size}"
    config = shipped(name)
    assert batch_size(config) == size
    assert config.optim.lr == 1e-5
    assert config.optim.schedule == "constant"
    assert f"batch size {size} on" in header(name)[1]
    assert f"Recall@1 {recall}." in header(name)[1]


@pytest.mark.parametrize(("dataset", "sizes"), [("sop", SOP), ("cub200", CUB)])
def test_every_size_of_a_study_sees_the_same_number_of_images(
    dataset: str, sizes: dict[int, str]
) -> None:
    assert len({plan(shipped(f"{dataset}_bs{size}")).images for size in sizes}) == 1


@pytest.mark.parametrize("size", [64, 128, 256, 512, 1024])
def test_embedding_size_study(size: int) -> None:
    name = f"cars196_dim{size}"
    assert shipped(name).model.embedding_size == size
    assert f"embedding size {size} on" in header(name)[1]


@pytest.mark.parametrize(("row", "loss", "mined", "recall"), [(k, *v) for k, v in ABLATION.items()])
def test_ablation(row: str, loss: str, mined: bool, recall: str) -> None:
    name = f"cars196_ablation_{row}"
    config = shipped(name)
    assert config.model.embedding_size == 64
    assert config.loss.name == loss
    assert ("eps" in config.loss.parameters) == mined
    assert config.loss.parameters.get("alpha", 2) == 2
    assert config.loss.parameters.get("beta", 50) == 50
    assert f"Recall@1 {recall}," in "\n".join(header(name))


def test_the_rows_of_the_ablation_differ_in_nothing_but_the_loss() -> None:
    first, *others = (shipped(f"cars196_ablation_{row}") for row in ABLATION)
    for other in others:
        same = [n for n in vars(first) if getattr(first, n) == getattr(other, n)]
        assert set(vars(first)) - set(same) == {"run", "loss"}


def test_the_authors_recipe_for_cub200() -> None:
    config = shipped("cub200")
    assert batch_size(config) == 80
    assert (config.optim.lr, config.optim.weight_decay) == (3e-5, 5e-4)
    assert (config.length.steps, config.optim.milestones) == (3000, (1200, 2400))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("preset", "lam", "beta"), [("paper", 1.0, 50.0), ("authors", 0.5, 40.0)])
def test_presets_overlay_any_config(name: str, preset: str, lam: float, beta: float) -> None:
    config = load([path(name), path(f"presets/{preset}")])
    assert config.loss.name == "multi_similarity"
    assert config.loss.parameters == {"alpha": 2.0, "beta": beta, "lam": lam, "eps": 0.1}


def test_sop_bs1000_divides_among_8_processes() -> None:
    assert plan(shipped("sop_bs1000"), processes=8).images_per_process == 125
