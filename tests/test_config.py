"""Oracle: the texts and values a reader expects, written out literally."""

import json
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dml.catalogue import LOSS_PARAMETERS
from dml.config import EXECUTION, SECTIONS, Config, Length, load, to_dict, to_yaml
from dml.config.reference import reference
from dml.config.sections import KEYS
from dml.config.synonyms import SYNONYMS
from dml.errors import ConfigError

ROOT = Path(__file__).parent.parent

BASE = """
run: {name: test}
data: {dataset: sop, shards: data/sop}
batch: {classes: 16}
length: {steps: 100}
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def problems(*paths: str, sets: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(paths, sets)
    return [str(problem) for problem in error.value.problems]


def base_with(*sets: str) -> Config:
    return load(["base.yaml"], sets)


# ---- what a good config says ---------------------------------------------------------------


def test_defaults() -> None:
    config = base_with()
    assert config.batch.per_class == 5
    assert config.model.backbone == "bn_inception"
    assert config.model.embedding_size == 512
    assert config.model.batchnorm == "frozen"
    assert config.loss.name == "multi_similarity"
    assert config.loss.parameters == {"alpha": 2.0, "beta": 40.0, "lam": 0.5, "eps": 0.1}
    assert config.length == Length(steps=100)
    assert config.eval.ks == (1, 10, 100, 1000)


def test_sections_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        base_with().batch.classes = 3  # type: ignore[misc]


def test_ks_default_to_those_of_the_dataset() -> None:
    assert base_with("data.dataset=cub200").eval.ks == (1, 2, 4, 8, 16, 32)
    assert base_with("data.dataset=cub200", "eval.ks=[1, 3]").eval.ks == (1, 3)


def test_the_dimensions_of_the_margin_loss_are_those_of_the_embedding() -> None:
    config = base_with("loss.name=margin", "model.embedding_size=64")
    assert config.loss.parameters["dim"] == 64
    write("again.yaml", to_yaml(config))
    assert load(["again.yaml"]) == config
    assert base_with("loss.name=margin").loss.parameters["dim"] == 512
    assert "dim" not in base_with("loss.name=triplet").loss.parameters
    assert problems("base.yaml", sets=("loss.name=margin", "loss.dim=128")) == [
        "loss.dim = 128 (--set): must be model.embedding_size, which is 512; drop loss.dim"
    ]
    (wrong,) = problems("base.yaml", sets=("loss.name=margin", "model.embedding_size=many"))
    assert wrong.startswith("model.embedding_size = 'many'")


def test_a_loss_with_lists_and_a_choice_round_trips() -> None:
    sets = ("loss.name=recall_surrogate", "loss.ks=[1, 4]", "loss.taus=[1, 2.5]")
    config = base_with(*sets)
    assert config.loss.parameters["ks"] == (1, 4)
    assert config.loss.parameters["taus"] == (1.0, 2.5)
    write("again.yaml", to_yaml(config))
    assert load(["again.yaml"]) == config
    assert base_with(*sets[:2]).loss.parameters["taus"] == (1.0, 4.0), "tau_k = k"
    assert base_with("loss.name=supcon", "loss.variant=in").loss.parameters["variant"] == "in"


def test_every_section_of_the_contract_exists() -> None:
    contract = "run, data, batch, model, loss, memory, towers, engine, optim, length, eval, save"
    assert ", ".join(SECTIONS) == contract


# ---- overlays ------------------------------------------------------------------------------


def test_later_files_overlay_key_by_key_and_set_comes_last() -> None:
    write("b.yaml", "batch: {per_class: 4}\nmodel: {embedding_size: 64}")
    config = load(["base.yaml", "b.yaml"], ["model.embedding_size=32"])
    assert (config.batch.classes, config.batch.per_class) == (16, 4)
    assert config.model.embedding_size == 32


def test_extends_is_relative_to_its_file_and_lies_below_it() -> None:
    write("a/common.yaml", "batch: {per_class: 4}\nrun: {seed: 1}")
    write("a/other.yaml", "run: {seed: 2}")
    write("a/b/x.yaml", "extends: [../common.yaml, ../other.yaml]\nbatch: {per_class: 3}")
    config = load(["base.yaml", "a/b/x.yaml"])
    assert config.batch.per_class == 3
    assert config.run.seed == 2


def test_a_file_may_be_extended_twice() -> None:
    write("a.yaml", "extends: base.yaml")
    write("b.yaml", "extends: [base.yaml, a.yaml]")
    assert load(["b.yaml"]) == load(["base.yaml"])


def test_mentioning_length_replaces_it() -> None:
    write("epochs.yaml", "length: {epochs: 3}")
    assert load(["base.yaml", "epochs.yaml"]).length == Length(epochs=3.0)
    assert load(["base.yaml", "epochs.yaml"], ["length.steps=50"]).length == Length(steps=50)


def test_another_loss_starts_afresh_and_the_same_one_does_not() -> None:
    write("ms.yaml", "loss: {name: multi_similarity, beta: 41, eps: 0.2}")
    same = load(["base.yaml", "ms.yaml"], ["loss.name=multi_similarity", "loss.alpha=3"])
    assert same.loss.parameters == {"alpha": 3.0, "beta": 41.0, "lam": 0.5, "eps": 0.2}
    other = load(["base.yaml", "ms.yaml"], ["loss.name=binomial_deviance"])
    assert other.loss.parameters == {"alpha": 2.0, "beta": 40.0, "lam": 0.5, "mine": False}


def test_a_loss_section_without_a_name_is_of_the_default_loss() -> None:
    write("beta.yaml", "loss: {beta: 45}")
    assert load(["base.yaml", "beta.yaml"]).loss.parameters["beta"] == 45
    named = load(["base.yaml", "beta.yaml"], ["loss.name=multi_similarity"])
    assert named.loss.parameters["beta"] == 45
    renamed = load(["base.yaml", "beta.yaml"], ["loss.name=triplet"])
    assert renamed.loss.parameters == {"lam": 0.1, "mine": False}


def test_the_order_of_sets_does_not_matter_between_name_and_parameters() -> None:
    sets = ["loss.lam=0.3", "loss.name=contrastive"]
    assert base_with(*sets) == base_with(*reversed(sets))


# ---- YAML ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lr"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("3.e-5", 3e-5), ("+.5", 0.5), ("1", 1.0)]
)
def test_numbers_are_those_of_yaml_1_2(text: str, lr: float) -> None:
    value = base_with(f"optim.lr={text}").optim.lr
    assert value == lr
    assert type(value) is float


def test_underscores_group_digits() -> None:
    assert base_with("length.images=3_200_000").length.images == 3_200_000


@pytest.mark.parametrize("text", ["010", "1:30", "0x10", "1e2"])
def test_yaml_1_1_readings_of_whole_numbers_are_refused(text: str) -> None:
    assert "must be a whole number" in problems("base.yaml", sets=(f"length.steps={text}",))[0]


@pytest.mark.parametrize("name", ["no", "on", "2024-01-01", "1:30"])
def test_words_stay_words(name: str) -> None:
    assert base_with(f"run.name={name}").run.name == name


@pytest.mark.parametrize(
    "text", [".nan", ".inf", "-.inf", "1e999", "'1e-5'", "true", "null", "[1]"]
)
def test_what_is_not_a_finite_number_is_no_rate(text: str) -> None:
    (line,) = problems("base.yaml", sets=(f"optim.lr={text}",))
    assert "(--set): must be a finite number, above 0; the default is 1e-05" in line


FIX = (
    "a config is a YAML file of sections"
    " (run, data, batch, model, loss, memory, towers, engine, optim, length, eval, save)"
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- 1\n- 2\n", "is not a mapping of sections"),
        (b"hello", "is not a mapping of sections"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (
            b"batch: {classes: 2, classes: 3}",
            "line 1 is not YAML: the key 'classes' is there twice, first in line 1",
        ),
        (
            b"run: {}\nbatch: {}\nrun: {}",
            "line 3 is not YAML: the key 'run' is there twice, first in line 1",
        ),
        (b"a: 1\nb: [", "line 2 is not YAML: expected the node content, but found '<stream end>'"),
        (b"a: 1\n--- \nb: 2", "line 2 is not YAML: but found another document"),
        (b"extends: 5", "extends must be a path or a list of paths"),
        (b"extends: [a.yaml, {}]", "extends must be a path or a list of paths"),
        (b"extends:", "extends must be a path or a list of paths"),
    ],
)
def test_a_file_that_is_no_config_gives_one_sentence(content: bytes, reason: str) -> None:
    Path("bad.yaml").write_bytes(content)
    assert problems("bad.yaml") == [f"bad.yaml: {reason}; {FIX}"]


@pytest.mark.parametrize(
    "content",
    [
        *(b"a: \x00", b"a: !!python/object:os.system {}", b"? [a]\n: b", b"a: !!int x"),
        *(b"a: !!map x", b"a: !!bool x", b"a: !!timestamp x", b'a: !!int ""', b'a: !!float ""'),
    ],
)
def test_odd_yaml_is_one_line_and_no_other_exception(content: bytes) -> None:
    Path("bad.yaml").write_bytes(content)
    (line,) = problems("bad.yaml")
    assert "not YAML" in line
    assert "\n" not in line


def test_missing_files_and_directories() -> None:
    Path("folder.yaml").mkdir()
    assert problems("none.yaml", "folder.yaml") == [
        f"{Path.cwd()}/none.yaml: No such file or directory; check the path",
        f"{Path.cwd()}/folder.yaml: Is a directory; check the path",
    ]


def test_a_missing_extended_file_is_named_in_full() -> None:
    write("a/x.yaml", "extends: ../b/y.yaml")
    missing = f"{Path.cwd()}/b/y.yaml"
    assert problems("a/x.yaml") == [f"{missing}: No such file or directory; check the path"]


@pytest.mark.parametrize("back", ["a.yaml", "../here/a.yaml", "b.yaml"])
def test_a_circle_of_extends_is_refused(back: str) -> None:
    write("here/a.yaml", "extends: b.yaml")
    write("here/b.yaml", f"extends: {back}")
    assert problems("here/a.yaml") == [
        (
            f"here/{Path(back).name}: extends itself, directly or through other files;"
            " remove one of these extends"
        )
    ]


# ---- problems ------------------------------------------------------------------------------


def test_all_problems_are_reported_together_each_with_value_source_rule_and_fix() -> None:
    write(
        "bad.yaml",
        """
        run: {name: a/b}
        data: {dataset: sopp, shards: data/sop}
        bacth: {classes: 16}
        batch: {clases: 16, per_class: 0}
        model: {lr: 1e-5, batchnorm: forzen}
        loss: {name: multi_similarity, betta: 40}
        optim: {milestones: [1200, 2400]}
        """,
    )
    sections = "run, data, batch, model, loss, memory, towers, engine, optim, length, eval, save"
    with pytest.raises(ConfigError) as error:
        load(["bad.yaml"], ["length.stps=10"])
    assert str(error.value).splitlines() == [
        "11 problems in bad.yaml:",
        (
            "  bacth = {'classes': 16} (bad.yaml): unknown section;"
            f" did you mean batch? the sections are {sections}"
        ),
        (
            "  run.name = 'a/b' (bad.yaml): must be text, printable, without a slash, not empty,"
            " not starting with a dot, at most 200 bytes; for example run.name=my_run"
        ),
        (
            "  data.dataset = 'sopp' (bad.yaml): must be text, one of sop, cub200, cars196, inshop,"
            " icons, folder; did you mean sop?"
        ),
        (
            "  batch.clases = 16 (bad.yaml): unknown key; did you mean batch.classes?"
            " batch has classes, per_class, group, mixed"
        ),
        "  batch.classes: is required; for example batch.classes=16",
        (
            "  batch.per_class = 0 (bad.yaml): must be a whole number, at least 1, at most 1,000,000;"
            " the default is 5"
        ),
        (
            "  model.lr = 1e-05 (bad.yaml): unknown key; did you mean optim.lr?"
            " model has backbone, weights, embedding_size, batchnorm, checkpointing, head, hidden, dropout"
        ),
        (
            "  model.batchnorm = 'forzen' (bad.yaml): must be text, one of frozen, synced, local;"
            " did you mean frozen?"
        ),
        (
            "  loss.betta = 40 (bad.yaml): unknown parameter; did you mean beta?"
            " multi_similarity takes alpha, beta, lam, eps"
        ),
        (
            "  length.stps = 10 (--set): unknown key; did you mean length.steps?"
            " length has steps, epochs, images"
        ),
        (
            "  optim.milestones = [1200, 2400] (bad.yaml): has no effect with schedule constant;"
            " set optim.schedule=step or optim.milestones=[]"
        ),
    ]


def test_a_key_that_several_sections_have_is_not_guessed() -> None:
    assert problems("base.yaml", sets=("model.name=resnet50",)) == [
        (
            "model.name = 'resnet50' (--set): unknown key;"
            " model has backbone, weights, embedding_size, batchnorm, checkpointing, head, hidden, dropout"
        )
    ]


def test_one_problem_is_singular_and_names_every_file() -> None:
    write("b.yaml", "batch: {classes: 1}")
    with pytest.raises(ConfigError, match=r"^1 problem in base.yaml, b.yaml:\n  batch.classes = 1"):
        load(["base.yaml", "b.yaml"])


def test_the_source_is_the_layer_that_spoke_last() -> None:
    write("b.yaml", "extends: base.yaml\nbatch: {classes: 1}")
    assert problems("b.yaml")[0].startswith("batch.classes = 1 (b.yaml): ")
    assert problems("b.yaml", sets=("batch.classes=0",))[0].startswith("batch.classes = 0 (--set)")


@pytest.mark.parametrize("text", ["", "=", "foo", "foo=1", "batch.=1", "batch.classes", "length=1"])
def test_a_set_must_be_section_key_value(text: str) -> None:
    assert problems("base.yaml", sets=(text,)) == [
        f"--set {text}: must be section.key=value; for example --set batch.classes=16"
    ]


def test_a_set_of_an_unknown_section() -> None:
    (line,) = problems("base.yaml", sets=("los.beta=40",))
    assert line.startswith("los.beta = '40' (--set): unknown section; did you mean loss? ")


def test_a_set_that_is_not_yaml() -> None:
    assert problems("base.yaml", sets=("eval.ks=[1",)) == [
        (
            "eval.ks = '[1' (--set): line 1 is not YAML: expected ',' or ']',"
            " but got '<stream end>'; quote the value"
        )
    ]


def test_an_empty_section_is_not_a_mapping() -> None:
    write("b.yaml", "model:\nbatch: 5")
    assert problems("base.yaml", "b.yaml") == [
        "model = None (b.yaml): must be a mapping; write model: {key: value}, or remove it",
        "batch = 5 (b.yaml): must be a mapping; write batch: {key: value}, or remove it",
    ]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("run.name=", "must be text"),
        ("run.name=''", "not empty"),
        ("run.name=.hidden", "not starting with a dot"),
        ("run.name=a/b", "without a slash"),
        ("run.name=5", "must be text"),
        ("run.seed=-1", "must be a whole number, at least 0"),
        ("run.seed=true", "must be a whole number"),
        ("run.dir=''", "not empty"),
        ("data.shards=null", "must be text"),
        ("data.workers=-1", "at least 0"),
        ("batch.classes=1", "at least 2"),
        ("batch.classes=true", "must be a whole number"),
        ("batch.classes='10'", "must be a whole number"),
        ("batch.classes=10.0", "must be a whole number"),
        ("batch.per_class=1", "at least 2"),
        ("model.backbone=timm:", "or timm:NAME"),
        ("model.embedding_size=0", "at least 1"),
        ("model.batchnorm=[frozen]", "one of frozen, synced, local"),
        ("loss.beta=0", "above 0"),
        ("loss.mine=true", "unknown parameter"),
        ("engine.precision=fp61", "one of fp32, bf16"),
        ("engine.tile=0", "at least 1"),
        ("engine.micro_batch=0", "at least 1, at most 1,000,000,000, or null"),
        ("engine.precision=fp16", "one of fp32, bf16"),
        ("optim.lr=0", "above 0"),
        ("optim.weight_decay=-1", "at least 0"),
        ("optim.milestones=[2, 2]", "strictly increasing"),
        ("optim.milestones=[0, 2]", "positive"),
        ("optim.milestones=5", "must be a list of whole numbers"),
        ("optim.milestones=[5]", "has no effect with schedule constant"),
        ("optim.schedule=step", "needs optim.milestones"),
        ("optim.gamma=0", "above 0"),
        ("optim.warmup_steps=-1", "at least 0"),
        ("length.steps=0", "at least 1"),
        ("length.steps=1.5", "must be a whole number"),
        ("length.epochs=-1", "above 0"),
        ("length.steps=null", "must have exactly one of steps, epochs, images"),
        ("eval.ks=[]", "not empty"),
        ("eval.ks=[10, 1]", "strictly increasing"),
        ("eval.every_steps=0", "at least 1, at most 1,000,000,000, or null"),
        ("eval.validation_classes=1", "at least 0 and below 1"),
        ("eval.validation_classes=0.1", "without eval.every_steps"),
        ("save.every_minutes=0", "above 0"),
    ],
)
def test_each_rule_is_enforced_alone(text: str, rule: str) -> None:
    (line,) = problems("base.yaml", sets=(text,))
    assert line.startswith(text.split("=")[0].replace("length.steps", "length"))
    assert re.search(f"{re.escape(rule)}.*; .+", line), "the fix follows the rule"


def test_exactly_one_length() -> None:
    assert problems("base.yaml", sets=("length.steps=5", "length.images=10")) == [
        (
            "length = {'steps': 5, 'images': 10} (--set): must have exactly one of"
            " steps, epochs, images; for example length.steps=3000"
        )
    ]


@pytest.mark.parametrize(
    "sets",
    [
        ["optim.schedule=step", "optim.milestones=[5, 9]"],
        ["eval.validation_classes=0.1", "eval.every_steps=5"],
        ["model.backbone=timm:vit_small_patch16_224"],
        ["engine.micro_batch=null", "model.weights=null"],
        ["loss.name=lifted_structure_star", "loss.mine=true", "loss.eps=0.2"],
        ["length.epochs=0.5"],
    ],
)
def test_allowed_combinations_round_trip(sets: list[str]) -> None:
    config = base_with(*sets)
    write("again.yaml", to_yaml(config))
    assert load(["again.yaml"]) == config


@given(
    name=st.text(st.characters(codec="utf-8"), min_size=1).filter(
        lambda s: s.isprintable() and not re.match(r"\.|.*/", s) and len(s.encode()) <= 200
    ),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_any_name_and_number_survives_the_round_trip(name: str, lr: float, seed: int) -> None:
    sets = [f"run.name={json.dumps(name, ensure_ascii=False)}"]
    config = load(["base.yaml"], [*sets, f"optim.lr={lr!r}", f"run.seed={seed}"])
    assert (config.run.name, config.optim.lr, config.run.seed) == (name, lr, seed)
    Path("again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load(["again.yaml"]) == config


@pytest.mark.parametrize("name", ["1e-5", "010", "10", "null", "~", "true", "no", "- a", "a: b"])
def test_a_name_that_looks_like_something_else_survives_the_round_trip(name: str) -> None:
    config = base_with(f"run.name='{name}'")
    assert config.run.name == name
    write("again.yaml", to_yaml(config))
    assert load(["again.yaml"]) == config


def test_to_dict_is_plain_and_resolved() -> None:
    tree = to_dict(base_with("loss.name=triplet"))
    assert yaml.safe_load(yaml.safe_dump(tree)) == tree
    assert tree["loss"] == {"name": "triplet", "lam": 0.1, "mine": False}
    assert tree["eval"]["ks"] == [1, 10, 100, 1000]
    assert list(tree) == list(SECTIONS)


def test_config_and_error_can_be_pickled() -> None:
    config = base_with()
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError) as error:
        base_with("batch.classes=1")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_config_and_plan_import_neither_torch_nor_numpy() -> None:
    code = "import sys, dml.config, dml.plan; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_config_is_a_value_that_cannot_change() -> None:
    config = load(ROOT / "configs" / "sop_bs1000.yaml")  # a single path will do
    assert hash(config) == hash(load([ROOT / "configs" / "sop_bs1000.yaml"]))
    config.loss.parameters["beta"] = 3
    assert config.loss.parameters["beta"] == 40


# ---- words of other programs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "meant"),
    [
        ("optim.learning_rate=1e-4", "optim.lr"),
        ("learning_rate=1e-4", "optim.lr"),
        ("lr=1e-4", "optim.lr"),
        ("train.lr=1e-4", "optim.lr"),
        ("optim.epochs=3", "length.epochs"),
        ("epochs=3", "length.epochs"),
        ("batch.size=64", "batch.classes and batch.per_class"),
        ("data.batch_size=64", "batch.classes and batch.per_class"),
        ("batch-size=64", "batch.classes and batch.per_class"),
        ("data.num_workers=4", "data.workers"),
        ("margin=0.1", "loss.lam"),
        ("loss.margin=0.1", "eps"),
        ("loss.scale_neg=40", "beta"),
        ("data.image_size=96", "data.size"),
        ("optim.optimizer=sgd", "optim.name"),
        ("run.output_dir=x", "run.dir"),
    ],
)
def test_words_of_other_programs_are_understood(sets: str, meant: str) -> None:
    (line,) = problems("base.yaml", sets=(sets,))
    assert f"did you mean {meant}? " in line


@pytest.mark.parametrize(
    ("text", "meant"),
    [("batch_size: 64", "batch.classes and batch.per_class"), ("base: x", "extends")],
)
def test_also_at_the_top_of_a_file(text: str, meant: str) -> None:
    write("other.yaml", text)
    assert f"did you mean {meant}? " in problems("base.yaml", "other.yaml")[0]


def test_every_synonym_leads_to_a_key() -> None:
    for meant in SYNONYMS.values():
        for key in meant.split(" and "):
            assert key in (*KEYS, "loss.lam", "loss.eps", "extends")


@pytest.mark.parametrize(
    ("name", "meant"), [("multi_similarity", "eps"), ("triplet", "lam"), ("ms_weighting", "lam")]
)
def test_a_margin_is_what_the_loss_calls_one(name: str, meant: str) -> None:
    (line,) = problems("base.yaml", sets=(f"loss.name={name}", "loss.margin=0.1"))
    assert f"did you mean {meant}? " in line


# ---- docs/config.md --------------------------------------------------------------------------


def test_the_page_of_the_config_is_what_the_program_prints() -> None:
    command = [sys.executable, "-m", "dml.config"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == printed, "write it again: python -m dml.config > docs/config.md"


def rows() -> dict[str, list[str]]:
    """The tables of docs/config.md: first cell -> the other cells."""
    cells = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in reference().splitlines()
        if line.startswith("| `")
    )
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_page_has_every_key_and_marks_those_that_may_change() -> None:
    found = rows()
    assert set(KEYS) <= set(found)
    assert {key for key in KEYS if found[key][3] == "may change"} == EXECUTION
    assert all(found[key][4] for key in KEYS), "every key has a meaning"


def test_the_page_has_every_loss_with_its_parameters() -> None:
    found = rows()
    assert found["multi_similarity"] == ["`alpha: 2`, `beta: 40`, `lam: 0.5`, `eps: 0.1`"]
    assert found["triplet"] == ["`lam: 0.1`, `mine: false`, `eps: 0.1`"]
    for name, defaults in LOSS_PARAMETERS.items():
        assert name in found
        for parameter in defaults:
            assert found[f"loss.{parameter}"][-1], f"{parameter} has no meaning"


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("run.seed", ["whole number", "`0`", "at least 0, below 2^63", ""]),
        ("optim.lr", ["number", "`1e-5`", "above 0", ""]),
        (
            "data.workers",
            ["whole number or null", "`null`", "at least 0, at most 1,000", "may change"],
        ),
        ("data.size", ["whole number or null", "`null`", "at least 1, at most 10,000", ""]),
        ("batch.classes", ["whole number", "required", "at least 2, at most 10,000,000", ""]),
        ("eval.untrained", ["true or false", "`false`", "", ""]),
        ("engine.precision", ["text", "`fp32`", "one of `fp32`, `bf16`, `fp64`", ""]),
        (
            "optim.milestones",
            [
                "list of whole numbers",
                "`[]`",
                "positive and strictly increasing, at most 1,000,000,000",
                "",
            ],
        ),
    ],
)
def test_a_row_of_the_page(key: str, cells: list[str]) -> None:
    assert rows()[key][:4] == cells
