"""Configs and sweeps that would take for ever or all memory, and values that no program expects.

Oracle: a sentence and exit code 2 within seconds and 1 GiB of memory, and no exception but a
ConfigError or SweepError.
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from fleet import ROOT

from dml import train
from dml.catalogue import LOSS_PARAMETERS
from dml.config import load, parse, to_yaml
from dml.config.sections import KEYS
from dml.errors import ConfigError
from dml.plan import plan
from dml.rules import Problem, shown
from launch.resources import KEYS as RESOURCES
from launch.slurm import main as slurm
from launch.sweep import MOST_RUNS, SweepError, read_sweep

BASE = {
    "run": {"name": "test"},
    "data": {"dataset": "sop", "shards": "data/sop"},
    "batch": {"classes": 16},
    "length": {"steps": 100},
}
SECONDS, BYTES = 15, 2**30


def laughs(first, level):
    """Ten levels of ten aliases each: 10^10 times the first."""
    lines = [f"a0: &a0 {first}", *(f"a{i}: &a{i} {level(f'*a{i - 1}')}" for i in range(1, 11))]
    return "\n".join(lines)


def many(section, count=20_000):
    return f"{section}:\n" + "".join(f"  k{i}: 1\n" for i in range(count))


def ten(alias):
    return f"[{', '.join([alias] * 10)}]"


def keys(alias):
    return "{" + ", ".join(f"k{i}: {alias} " for i in range(10)) + "}"


BOMBS = {
    "aliases in lists": (laughs("[x, x]", ten), "its aliases (*) stand for more than"),
    "aliases in mappings": (laughs("{x: y}", keys), "its aliases (*) stand for more than"),
    "a long text, often": (
        f"a: &a {'x' * 10_000}\nrun: [{', '.join(['*a'] * 10_000)}]",
        "its aliases (*) stand for more than",
    ),
    "an alias of itself": ("run: &a [*a]", "its aliases (*) stand for more than"),
    "a chain of aliases": (
        "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 5_000)),
        "nested more than 50 levels deep",
    ),
    "merge keys": (
        laughs("{x: y}", lambda alias: f"{{!!merge <<: {ten(alias)}}}"),
        "is not YAML",
    ),
    "nested lists": ("run: " + "[" * 100_000, "nested more than 50 levels deep"),
    "nested, closed": ("run: " + "[" * 200 + "]" * 200, "nested more than 50 levels deep"),
    "nested blocks": ("\n".join(" " * i + "a:" for i in range(700)), "nested more than 50 levels"),
    "unknown sections": (
        "".join(f"bat{i}: 1\n" for i in range(20_000)),
        "bat9 and 19,990 more",
    ),
    "unknown keys": (many("batch"), "batch.k9 and 19,990 more"),
    "unknown parameters": (many("loss"), "loss.k9 and 19,990 more"),
    "a long list": ("eval: {ks: [" + "1, " * 80_000 + "1]}", "eval.ks = [1, 1, 1"),
    "a long key": ("x" * 1_000 + ": 1", "x" * 197 + "... = 1"),
    "many digits": ("batch: {classes: " + "9" * 5_000 + "}", "a number of 5,000 digits"),
    "very many digits": ("batch: {classes: " + "9" * 200_000 + "}", "a number of 200,000 digits"),
    "digits and a letter": ("batch: {classes: " + "9" * 200_000 + "x}", "batch.classes = '9999"),
    "digits, tagged": ("batch: {classes: !!int '1" + ":1" * 100_000 + "'}", "digits"),
    "hexadecimal": ("batch: {classes: !!int '0x" + "f" * 300 + "'}", "is not a number"),
    "a long tag": ("a: !" + "x" * 100_000 + " 1", "is not YAML"),
    "a long alias": ("a: *" + "x" * 100_000, "is not YAML: found undefined alias 'xxx"),
    "a set": ("batch: !!set {a, b}", "is not YAML"),
    "a long file": ("# " + "x" * 2**20, "is longer than 262,144 bytes"),
    "zeros": ("\0" * 1000, "not YAML"),
}  # fmt: skip


def bounded(*command, cwd, **variables):
    """The program's result with little memory and CPU time."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))

    before = used_by_children()
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        preexec_fn=limit,
        capture_output=True,
        timeout=4 * SECONDS,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr[-3000:]
    assert used_by_children() - before < SECONDS
    return done


def used_by_children():
    """Seconds of CPU time: a busy machine does not add to them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_that_would_not_end(tmp_path, name):
    text, words = BOMBS[name]
    (tmp_path / "bomb.yaml").write_text(text)
    done = bounded("-m", "dml.plan", "--config", "bomb.yaml", cwd=tmp_path)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert words in said, said[-3000:]
    assert len(said) < 20_000
    assert said.count("\n") < 60


@pytest.mark.parametrize("name", BOMBS)
def test_a_sweep_that_would_not_end(tmp_path, name):
    text, _ = BOMBS[name]
    (tmp_path / "bomb.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(SweepError) as caught:
        read_sweep(tmp_path / "bomb.yaml")
    assert time.process_time() - start < SECONDS
    assert len(str(caught.value)) < 30_000


def test_a_config_without_an_end(tmp_path):
    with (tmp_path / "sparse.yaml").open("wb") as file:
        file.truncate(2**40)
    for path in ("/dev/zero", "sparse.yaml"):
        done = bounded("-m", "dml.plan", "--config", path, cwd=tmp_path)
        assert done.returncode == 2
        assert f"{path}: is longer than".encode() in done.stderr
        done = bounded(ROOT / "launch/slurm.py", "--sweep", path, "--dry-run", cwd=tmp_path)
        assert done.returncode == 2
        assert f"{path}: is longer than".encode() in done.stderr


@pytest.mark.parametrize("shape", ["diamonds", "chain"])
def test_files_that_extend_each_other_too_often(tmp_path, monkeypatch, shape):
    """Forty levels of two: 2^40 files to read. A chain as deep as Python's stack."""
    monkeypatch.chdir(tmp_path)
    depth = 40 if shape == "diamonds" else 2_000
    for i in range(depth):
        names = [f"{i + 1}.yaml"] * (2 if shape == "diamonds" else 1)
        Path(f"{i}.yaml").write_text(f"extends: [{', '.join(names)}]\n")
    Path(f"{depth}.yaml").write_text(json.dumps(BASE))
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"extends: more than 100 files are read; a file that is"):
        load("0.yaml")
    assert time.process_time() - start < SECONDS
    load(f"{depth - 4}.yaml")


def test_a_sweep_of_too_many_runs(tmp_path):
    axes = {f"axis{i}": {f"p{i}x{j}": {} for j in range(10)} for i in range(30)}
    (tmp_path / "study.yaml").write_text(json.dumps({"base": "base.yaml", "grid": axes}))
    with pytest.raises(SweepError, match=rf"{10**30:,} runs: the limit is {MOST_RUNS:,}; divide"):
        read_sweep(tmp_path / "study.yaml")


def test_many_problems_of_a_sweep_are_not_all_listed(tmp_path):
    points = {f"a/{i}": {} for i in range(4_000)}
    (tmp_path / "study.yaml").write_text(json.dumps({"base": "x", "grid": {"axis": points}}))
    with pytest.raises(SweepError, match=r"^4000 problems") as caught:
        read_sweep(tmp_path / "study.yaml")
    assert str(caught.value).count("\n") == 51
    assert str(caught.value).endswith("and 3,950 more")


@pytest.mark.parametrize(
    "value", [[1, [2, {"a": "b"}]], {"a": None}, "x", 1.5, (1, 2), [], {}, True]
)
def test_a_short_value_is_shown_as_it_is(value):
    assert shown(value) == repr(value)


def test_a_value_is_shown_without_the_whole_of_it():
    for value in (list(range(10**6)), {i: i for i in range(10**6)}, "x" * 10**7, 10**90):
        assert shown(value) == f"{repr(value)[:57]}..."
    assert shown(10**5000) == "a number of about 5,000 digits"
    endless = [0]
    endless.append(endless)
    assert shown(endless) == f"{'[0, ' * 15}"[:57] + "..."
    nested = []
    for _ in range(10**5):
        nested = [nested]
    assert shown(nested) == "[" * 57 + "..."
    assert str(Problem("key", nested, "rule", "fix")).startswith("key = [[[")


# ---- hostile values for every key ------------------------------------------------------------------

VALUES = [
    *(0, -1, 1, 2, 10**9, 10**12, 10**30, 10**300, -(10**30), 10**399, 2**63, 2**64),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308),
    *(True, None, [], {}, [[]], [1], [1, 10**30], ["x"], {"a": [1]}, list(range(1, 300))),
    *("", " ", ".", "..", "/", "~", "a\0b", "\0", "\ud800", "\udcff", "a\nb", "\x1b[2J", "é", "🦆"),
    *(
        "x" * 300,
        "x/" * 3000,
        "x" * 100_000,
        "timm:",
        "timm:\0",
        "timm:é",
        "timm:../x",
        "pretrained",
    ),
    *("nan", "inf", "1e5", "auto", "step", "cosine", "nca", "folder", "histogram", "/dev/null"),
    *("frozen", "adam", "fp32", "cache", "linear", "in", "sample", 512, [1, 2, 4, 8, 16]),
]
LOSS_KEYS = sorted({f"loss.{key}" for each in LOSS_PARAMETERS.values() for key in each})
LOSSES = {  # a loss with the parameter, where the default has none
    f"loss.{key}": name
    for name, each in LOSS_PARAMETERS.items()
    for key in each
    if key not in LOSS_PARAMETERS["multi_similarity"]
} | {"loss.mine": "nca"}
ALL_KEYS = [*KEYS, "loss.name", *LOSS_KEYS, "loss.mine"]


def with_value(key, value):
    """A config in which one key has a hostile value; as JSON, which is YAML."""
    section, _, name = key.partition(".")
    tree = json.loads(json.dumps(BASE))
    if section == "length":
        tree["length"] = {}
    if section == "memory":  # whose other keys need a size
        tree["memory"] = {"size": 80, "from_step": 0}
    if section == "towers":  # whose other keys need a y
        tree["towers"] = {"y": "texts"}
    tree.setdefault(section, {})[name] = value
    if key in LOSSES:
        tree["loss"]["name"] = LOSSES[key]
    return json.dumps(tree)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The exit code of the planning stage of dml/train.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda config, problem=None: 0)

    def check(*arguments):
        code = train.main(["--config", "x.yaml", *arguments])
        assert code in (0, 2)
        return code

    return check


@pytest.mark.parametrize("key", ALL_KEYS)
def test_any_value_is_accepted_or_refused(planned, capsys, key):
    accepted = refused = 0
    for value in VALUES:
        Path("x.yaml").write_text(with_value(key, value))
        code = planned()
        said = capsys.readouterr().err
        assert code == 0 or re.search(f"{re.escape(key.partition('.')[0])}.*: .*; .", said), said
        assert len(said) < 3_000
        accepted, refused = accepted + (code == 0), refused + (code == 2)
        if code == 0:
            config = load("x.yaml")
            Path("again.yaml").write_text(to_yaml(config), encoding="utf-8")
            assert load("again.yaml") == config
            for processes in (1, 3, 1024):
                with suppress(ConfigError):
                    str(plan(config, processes))
    assert accepted
    assert refused


@pytest.mark.parametrize("seed", range(5))
def test_any_values_on_the_command_line(planned, capsys, seed):
    rng = random.Random(seed)
    Path("x.yaml").write_text(json.dumps(BASE))
    for _ in range(60):
        sets = []
        for _ in range(rng.randint(1, 4)):
            key, value = rng.choice([*ALL_KEYS, "nonsense.key", "x"]), rng.choice(VALUES)
            text = rng.choice(
                [str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)]
            )
            sets.append(f"{key}={text}")
        planned("--set", *sets)
        assert len(capsys.readouterr().err) < 20_000


@pytest.mark.parametrize("seed", range(5))
def test_any_values_in_a_sweep(tmp_path, monkeypatch, capsys, seed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    rng = random.Random(seed)
    keys = [*ALL_KEYS, *(f"slurm.{key}" for key in RESOURCES)]
    Path("base.yaml").write_text(json.dumps(BASE))
    codes = []
    for _ in range(40):
        key, value = rng.choice(keys), rng.choice(VALUES)
        section, _, name = key.partition(".")
        point = {"slurm": {name: value}} if section == "slurm" else {key: value}
        tree = {"base": "base.yaml"} | rng.choice(
            [
                {"set": point},
                {"grid": {"axis": {"label": point}}},
                {"grid": {key: [value, 1]}},
                {"variants": {"label": point}},
                {"seeds": value},
                {"base": value},
                {"grid": value},
                {"slurm": value},
                {"set": value},
            ]
        )
        Path("study.yaml").write_text(json.dumps(tree))
        for action in ("--dry-run", "--status"):
            codes.append(slurm(["--sweep", "study.yaml", action]))
            assert len("".join(capsys.readouterr())) < 100_000
    assert set(codes) <= {0, 2}


@pytest.mark.parametrize("key", RESOURCES)
def test_any_resource(tmp_path, monkeypatch, capsys, key):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    Path("base.yaml").write_text(json.dumps(BASE))
    Path("study.yaml").write_text("base: base.yaml")
    for value in (each for each in map(str, VALUES) if each.isascii()):
        flag = f"--{key.replace('_', '-')}={value}"
        assert slurm(["--sweep", "study.yaml", "--dry-run", flag]) in (0, 2)
        capsys.readouterr()


@pytest.mark.parametrize("key", ["batch.classes", "batch.per_class"])
def test_what_no_machine_has_is_refused_by_the_plan(tmp_path, key):
    most = {"batch.classes": 10**7, "batch.per_class": 10**6}
    (tmp_path / "x.yaml").write_text(json.dumps(BASE))
    sets = ["data.dataset=icons", "data.size=10000", "batch.classes=1000", f"{key}={most[key]}"]
    with pytest.raises(ConfigError, match=r"need [\d,.]+ TiB of memory per process") as caught:
        plan(load(tmp_path / "x.yaml", sets))
    assert len(caught.value.problems) == 1


def test_the_number_of_steps_is_bounded_whatever_it_follows_from(tmp_path):
    (tmp_path / "x.yaml").write_text(json.dumps(BASE))
    for length in ("epochs=1e6", "images=1_000_000_000_000_000"):
        with pytest.raises(ConfigError, match="steps are too many"):
            plan(load(tmp_path / "x.yaml", [f"length.{length}", "batch.classes=2"]))


@pytest.mark.parametrize(
    "text", ["!!float '1" + ":0" * 9 + "'", "!!int 0b1", "!!int '" + "9" * 401 + "'"]
)
def test_numbers_are_decimal_and_short(text):
    with pytest.raises(ValueError, match=r"not a number|digits"):
        parse(text)


# ---- names that the terminal cannot show -----------------------------------------------------------

NAMES = [os.fsdecode(b"caf\xc3\xa9"), os.fsdecode(b"caf\xe9"), "\U0001f986"]


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1:strict", "utf-8:strict"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_the_terminal_cannot_show(tmp_path, name, encoding):
    run = tmp_path / "runs" / name / "a"
    run.mkdir(parents=True)
    (run / "failed.json").write_text(json.dumps({"reason": "caf\u00e9 \ud83e", "log": ["\ud800"]}))
    (tmp_path / f"{name}.yaml").write_text(json.dumps({**BASE, "x": 1}))
    (tmp_path / "base.yaml").write_text(json.dumps(BASE))
    (tmp_path / f"{name}-study.yaml").write_text("base: base.yaml")
    out = tmp_path / f"out-{name}"
    say = {"PYTHONIOENCODING": encoding, "PATH": ""}
    for command, code in (
        (["-m", "dml.plan", "--config", f"{name}.yaml"], 2),
        (["-m", "dml.config"], 0),
        ([ROOT / "launch/report.py", tmp_path / "runs", "--out", out], 0),
        ([ROOT / "launch/slurm.py", "--sweep", f"{name}.yaml", "--status"], 2),
        ([ROOT / "launch/slurm.py", "--sweep", f"{name}-study.yaml", "--status"], None),
    ):
        done = bounded(*command, cwd=tmp_path, **say)
        assert code is None or done.returncode == code, done.stderr
    assert (out / "report.html").exists()


def test_paths_with_nul_and_surrogates_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key, text in product(
        ["run.dir", "data.shards", "model.weights"], ["a\0b", "\ud800", "x" * 256]
    ):
        Path("x.yaml").write_text(with_value(key, text))
        with pytest.raises(ConfigError, match=f"{key} = .*must be text, a path, not empty"):
            load("x.yaml")
    for path in ("a\0b", "\ud800", "x" * 300):
        with pytest.raises(ConfigError):
            load(path)
        with pytest.raises(SweepError):
            read_sweep(path)
        Path("x.yaml").write_text(json.dumps({"extends": path, **BASE}))
        with pytest.raises(ConfigError):
            load("x.yaml")
