"""Every command and program in the docs is run, in a copy of the project and on tiny data.

The commands of a page are run in their order, as a reader would type them, in a folder of their own.
What a page takes from elsewhere (a dataset, photos, finished runs) is put there in miniature by
STAND_INS; what would take hours is made small by SMALLER; what cannot be run here at all is in CHECKED,
with the reason and with what is checked instead. A program that is in none of them is run as it stands,
so a new command needs a change here only if it needs an input or hours of its own.
"""

import contextlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from fleet import QUICK, ROOT, WORKERS, environment, start_each
from pictures import encode, make_folder, put
from test_keras_resnet50 import keras_weights, pack
from test_search import make_run
from test_shards_icons import drawn_by
from test_shards_icons import write as write_icons
from test_shards_sources import make_cars_folders, make_cub200, make_inshop, make_sop
from torch.nn.functional import normalize

from dml.config import load
from dml.gpw import dense_loss, dense_loss_of_towers, make_loss

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TESTS = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
COPIED = ("dml", "shards", "launch", "benchmarks", "configs", "Makefile", "pyproject.toml")
OPTIONAL = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
EXTRAS = re.findall(r"^(\w+) = \[", OPTIONAL.split("\n[")[0], re.MULTILINE)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# the programs behind the commands of `dml`, as the tables below name them
DML = {
    "demo": "dml demo",
    "train": "dml/train.py",
    "plan": "dml.plan",
    "embed": "dml/embed.py",
    "search": "dml/search.py",
    "index": "dml.inference.make_index",
    "look": "dml.look.program",
    "export": "dml.export.program",
    "shards build": "shards/build.py",
    "shards index-tars": "shards/index_tars.py",
    "shards sheet": "shards/sheet.py",
    "shards verify": "shards/verify.py",
    "sweep": "launch/slurm.py",
    "report": "launch/report.py",
    "config": "dml.config",
    "doctor": "dml.cli.doctor",
    "gpu-check": "dml.gpu_check.main",
}
NAMED = re.compile(r"# (\S+\.(?:py|yaml))\n")  # the first line of a block that is a file


# ---- reading a page -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(text):
    """The fenced blocks of a page, also those inside lists."""
    return [
        Block(language, re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
        for indent, language, body in FENCE.findall(text)
    ]


def commands(block):
    """The commands of a block, each a line; behind a prompt, where the block has prompts."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        for part in line.split(" && "):
            if shlex.split(part, comments=True):
                yield part


def files(page):
    """The programs and configs that a page shows whole, by name."""
    named = [(NAMED.match(block.text), block) for block in blocks(page.read_text())]
    return {name[1]: block.text for name, block in named if name}


@dataclass(frozen=True)
class Command:
    """program: the script, the module, or the name of what is run."""

    program: str
    words: list[str]

    @classmethod
    def of(cls, text):
        words = shlex.split(text, comments=True)
        name = Path(words[0]).name
        if name == "dml":
            return cls(DML.get(" ".join(words[1:3])) or DML.get(words[1], text), words)
        if name in ("python", "python3") and words[1] == "-m":
            return cls(words[2], words)
        if name in ("python", "python3"):
            return cls(words[1], words)
        if name == "torchrun" or words[:2] == ["accelerate", "launch"]:
            return cls(next(word for word in words if word.endswith(".py")), words)
        return cls(name, words)

    def option(self, name):
        """The words after an option."""
        after = self.words[self.words.index(name) + 1 :] if name in self.words else []
        ends = [i for i, word in enumerate(after) if word.startswith("-")]
        return after[: ends[0]] if ends else after

    def plain(self):
        """The words that belong to no option; for programs whose options have one value."""
        typed = [name for name, program in DML.items() if program == self.program]
        names = [self.program, *(name.split()[-1] for name in typed)]
        first = min(self.words.index(name) for name in names if name in self.words)
        words = self.words[first + 1 :]
        return [
            word
            for before, word in zip(["", *words], words, strict=False)
            if not word.startswith("-") and not before.startswith("--")
        ]


# ---- what a page takes from elsewhere, in miniature -----------------------------------------------


def make_icons(root):
    """The package of icons: six families draw the same concepts."""
    concepts = [f"{a} {b}" for a in ("red", "old", "big", "hot") for b in ("hen", "cup", "axe")]
    folder = root.with_name("package")
    names = [name.replace(" ", "-") for name in concepts]
    write_icons(folder, *drawn_by(["aa", "bb", "cc", "dd", "ee", "ff"], names))
    with tarfile.open(root, "w:gz") as tar:
        tar.add(folder, "package")


SOURCES = {
    "sop": make_sop,
    "cub200": make_cub200,
    "cars196": make_cars_folders,
    "inshop": make_inshop,
    "icons": make_icons,
    "icons_mini": make_icons,
    "folder": make_folder,
}
MINIATURE = ["--allow-counts", "--allow-singles", "--workers", "1"]


def dataset(command, here, tiny_run):
    """The dataset of shards/build.py, as it is published."""
    source, root = command.plain()[0], here / command.option("--root")[0]
    if not root.exists():
        SOURCES[source](root)
    # the published number of classes is not to be had from a miniature
    module = here / "shards/sources/icons_mini.py"
    module.write_text(
        re.sub(r"^CLASSES = \d+", "CLASSES = 2", module.read_text(), flags=re.MULTILINE)
    )
    out = here / command.option("--out")[0]
    if out.exists() and out.is_relative_to(here / "shards/bundled"):
        shutil.rmtree(out)  # a page that tells how the bundled shards were made


def shards(command, here, tiny_run):
    """The shards of a config."""
    config = load(existing(command.option("--config"), here), command.option("--set"))
    name, out = config.data.dataset, here / config.data.shards
    if not out.exists():
        SOURCES[name](here / "published" / name)
        build = [sys.executable, "shards/build.py", name, "--root", here / "published" / name]
        run([*build, "--out", out, *MINIATURE], here)


def photos(command, here, tiny_run):
    """A trained model, and images to embed or to search with."""
    trained, images, *query = (here / word for word in command.plain())
    if not trained.exists():
        shutil.copytree(tiny_run(), trained)
    if not images.exists() and not query:
        make_folder(images, splits=("mugs", "cups"))
    for path in query:
        if path.suffix == ".npy":
            np.save(path, np.ones(256, np.float32))  # as the features of the small network
        elif not path.exists():
            put(path, encode(1))


def looked_at(command, here, tiny_run):
    """A finished run, another one beside it, and the shards that their config names."""
    for folder in (command.words[2], *command.option("--beside")):
        if not (here / folder).exists():
            shutil.copytree(tiny_run(), here / folder)


def a_photo(command, here, tiny_run):
    put(here / "photo.jpg", encode(1))


def runs(command, here, tiny_run):
    """Finished runs, to report on."""
    folder = here / command.plain()[0]
    if not folder.exists():
        shutil.copytree(tiny_run(), folder / "some-seed0")


def keras_package(command, here, tiny_run):
    pack(here / command.words[-2], keras_weights())


STAND_INS = {
    "dml.models.keras_resnet50": keras_package,
    "shards/build.py": dataset,
    "dml/train.py": shards,
    "dml/embed.py": photos,
    "dml/search.py": photos,
    "dml.look.program": looked_at,
    "dml.export.program": looked_at,
    "use_onnx.py": a_photo,
    "launch/report.py": runs,
}


# ---- what would take hours, made small ------------------------------------------------------------


def small_training(command, here):
    """Two steps of a tiny batch on two processes. The paper's weights are not here: a small network."""
    config = load(existing(command.option("--config"), here), command.option("--set"))
    sets = ["length.steps=2", "batch.classes=2", "batch.per_class=2", "data.workers=0"]
    sets += ["eval.every_steps=null", "eval.patience=null"]
    if config.model.backbone != "none":
        sets += ["data.size=32", "data.resize=32"]
    sets += ["eval.validation_classes=0", "run.log_steps=1"]
    if config.model.weights and config.model.weights != "pretrained":
        sets += ["model.weights=null", "model.backbone=convnet"]
    words = re.sub(r"--(num_)?processes (\d+|auto)", r"--\1processes 2", shlex.join(command.words))
    return f"{words} --set {' '.join(sets)}"


def small_demo(command, here):
    return f"{shlex.join(command.words)} --set length.steps=2 batch.classes=2 data.size=32"


def small_build(command, here):
    """Other counts than published, in one process."""
    return shlex.join([*command.words, *MINIATURE])


PUBLISHED = "data.shards=published"  # no folder: a plan then takes the published sizes


def planned(command, here):
    """Without Slurm: planned, not submitted (tests/cluster submits)."""
    if "--status" in command.words:
        return shlex.join(command.words)
    submits = {"--dry-run", "--print-config"}.isdisjoint(command.words)
    return shlex.join([*command.words, *["--dry-run"] * submits, "--set", PUBLISHED])


def of_published_size(command, here):
    real = "--measure" in command.words  # it makes steps, so it needs the shards
    return shlex.join([*command.words, *["--set", PUBLISHED] * (not real)])


def other_images(command, here):
    """The shards of the tiny run are gone: the bundled ones. A server would not end."""
    words = shlex.join(word for word in command.words if word != "--serve")
    return f"{words} --images shards/bundled/icons-mini"


SMALLER = {
    "dml.look.program": other_images,
    "dml demo": small_demo,
    "dml/train.py": small_training,
    "dml.plan": of_published_size,
    "shards/build.py": small_build,
    "launch/slurm.py": planned,
}


# ---- what cannot be run here, and what is checked instead -----------------------------------------


def is_a_target(command, page):
    """make: it runs the tests themselves, or takes minutes."""
    run(["make", "-n", *command.words[1:]], ROOT)


def has_its_extras(command, page):
    """pip: there may be no network."""
    for word in command.words:
        assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.+)\]", word)))) <= set(EXTRAS), word


def is_the_package_of_the_page(command, page):
    """npm: there is no network, and the package has 100 MB."""
    name, _, version = command.words[-1].rpartition("@")
    file = name.removeprefix("@").replace("/", "-")
    assert set(re.findall(rf"{file}-([\d.]+)\.tgz", page.read_text())) == {version}


def is_installed(command, page):
    """tensorboard, pre-commit: a server that does not end; a hook in this very repository."""
    assert shutil.which(command.words[0].removeprefix(".venv/bin/"), path=environment()["PATH"])


def is_known(command, page):
    """git clone, cd into it, and its environment: this is where the tests are run."""


def is_a_campaign(command, page):
    """tests.chaos, tests.chaos.soak: they take minutes. tests/test_chaos.py has a short campaign."""
    program = command.program.removeprefix("tests.")
    parse = import_module(f"{program}.__main__" if program == "chaos" else program).parse
    parse(command.words[command.words.index(command.program) + 1 :])


def finds_no_gpu(command, page):
    """dml gpu-check: there is no GPU here. tests/test_gpu_check.py has its checks."""
    assert import_module(command.program).main(command.words[2:]) == 2


CHECKED = {
    "make": is_a_target,
    "dml.gpu_check.main": finds_no_gpu,
    "tests.chaos": is_a_campaign,
    "tests.chaos.soak": is_a_campaign,
    "pip": has_its_extras,
    "npm": is_the_package_of_the_page,
    "tensorboard": is_installed,
    "pre-commit": is_installed,
    "git": is_known,
    "cd": is_known,
    "source": is_known,
    "venv": is_known,
}


# ---- running a page -------------------------------------------------------------------------------


def existing(names, here):
    """Configs, of the page or of the package."""
    return [here / name if (here / name).exists() else name for name in names]


# In 1 of 100 launches gloo's threads abort a process of a user's own program that has done all its work
# (docs/log.md); dml/train.py avoids it. Then the command is run again.
GLOO = "terminate called without an active exception"


def ends_well(start, shown):
    """Run a command by `start`, which returns how it ended."""
    for _ in range(3):
        ended = start()
        if GLOO not in ended.stderr:
            break
    assert ended.returncode == 0, f"{shown}\n{ended.stdout}{ended.stderr}"


def variables(here):
    path = f"{here / '.bin'}:{environment()['PATH']}"
    return {"PYTHONPATH": f"{here}:{QUICK}", "PATH": path}


def run(words, here):
    """A command, typed in a folder; it must end well."""
    how = {"cwd": here, "env": environment(**variables(here)), "timeout": 280}
    shell = isinstance(words, str)
    command = ["bash", "-ec", words] if shell else [str(word) for word in words]
    ends_well(
        lambda: subprocess.run(command, check=False, capture_output=True, text=True, **how), words
    )


# Commands of `dml` that need torch. They and the launchers of a page's own programs are forks, which have
# imported the code of this project and not of its copy (of which `dataset` changes icons_mini).
NEED_TORCH = {
    *("dml demo", "dml/train.py", "dml/embed.py", "dml/search.py"),
    *("dml.inference.make_index", "dml.look.program", "dml.export.program"),
    *("shards/build.py", "shards/index_tars.py"),  # webdataset imports it
}


def run_in_fork(text, here):
    """A command of Python's packages, typed in a folder; it must end well."""
    name, *words = shlex.split(text, comments=True)
    program = shutil.which(name, path=variables(here)["PATH"])
    command = [WORKERS / "launching.py", program, *words]
    ends_well(lambda: start_each(command, [variables(here)], 280, here)[0], text)


# as pip writes it; that of the wheel is in tests/test_package.py
COMMAND = f"""#!{sys.executable}
import sys
from dml.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


def copy_of_the_project(here):
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            # with what Python has compiled, but not what another process is about to rename
            shutil.copytree(source, here / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(source, here / name)
    (here / ".venv").symlink_to(sys.prefix)
    put(here / ".bin" / "dml", COMMAND)
    (here / ".bin" / "dml").chmod(0o755)
    (here / "docs").mkdir()


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """page -> the folder in which all of its commands were run, once."""
    known = {}

    def tiny_run():
        """The folder of a finished run."""
        return follow(ROOT / "docs/training.md") / "runs/icons_mini"

    def follow(page):
        if page not in known:
            here = known[page] = tmp_path_factory.mktemp(page.stem)
            todo = [
                text
                for block in blocks(page.read_text())
                if block.language in ("bash", "console")
                for text in commands(block)
            ]
            if any(Command.of(text).program not in CHECKED for text in todo):
                copy_of_the_project(here)
            for name, text in files(page).items():
                put(here / name, text)
            for text in todo:
                follow_command(text, page, here, tiny_run)
        return known[page]

    return follow


def follow_command(text, page, here, tiny_run):
    command = Command.of(text)
    if command.program in CHECKED:
        CHECKED[command.program](command, page)
        return
    path = here / (command.program.replace(".", "/") + ".py")
    is_ours = (here / command.program).exists() or path.exists() or path.with_suffix("").is_dir()
    is_ours = is_ours or command.program == "dml demo"
    assert is_ours, f"a command that no test can run: {text}"
    if "--help" not in command.words:
        if command.program in STAND_INS:
            STAND_INS[command.program](command, here, tiny_run)
        if command.program in SMALLER:
            text = SMALLER[command.program](command, here)
    needs_torch = command.program in NEED_TORCH or "--measure" in command.words
    needs_torch = needs_torch and command.words[0] == "dml" and "icons_mini" not in command.words
    is_a_loop = command.words[0] in ("torchrun", "accelerate") and command.program in files(page)
    if needs_torch or is_a_loop:
        run_in_fork(text, here)
    else:
        run(text, here)


def title(page):
    return str(page.relative_to(ROOT))


# ---- the tests ------------------------------------------------------------------------------------


@pytest.mark.training
@pytest.mark.parametrize("page", PAGES, ids=title)
def test_the_commands_of_a_page(page, followed):
    followed(page)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_command_hides_in_another_kind_of_block(page):
    languages = {block.language for block in blocks(page.read_text())}
    assert languages <= {"bash", "console", "python", "yaml"}
    indented = re.findall(
        r"^ {4,}(?:\$ )?((?:\.venv/bin/)?[a-z]+) ", without_blocks(page), re.MULTILINE
    )
    programs = {"python", "dml", "accelerate", "torchrun", *CHECKED}
    if page.name != "log.md":  # which has the command of a result that is dated
        assert programs.isdisjoint(Path(word).name for word in indented)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_python_is_called_in_one_way(page):
    """As `python`, in the environment that the page says how to activate."""
    text = page.read_text()
    assert ".venv/bin/" not in text.replace("source .venv/bin/activate", "")
    typed = [
        Path(shlex.split(line)[0]).name
        for block in blocks(text)
        if block.language in ("bash", "console")
        for line in commands(block)
    ]
    installed = {"python", "accelerate", "torchrun", "tensorboard", "pip", "pre-commit"}
    if installed & set(typed):
        assert "source .venv/bin/activate" in text


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_programs_and_configs_of_a_page(page):
    """A file that a page shows is used by its commands; a few lines of Python run as they stand."""
    used = " ".join(block.text for block in blocks(page.read_text()))
    for name in files(page):
        assert len(re.findall(rf"\b{Path(name).stem}\b", used)) > 1, f"{name} is used by no command"
    for block in blocks(page.read_text()):
        if block.language == "python" and not NAMED.match(block.text) and page != FROM_PYTHON:
            embeddings = normalize(torch.randn(20, 8)).requires_grad_()
            names = {"embeddings": embeddings, "labels": torch.arange(5).repeat(4)}
            exec(block.text, names)  # noqa: S102
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)


FROM_PYTHON = ROOT / "docs/python.md"


def test_the_programs_of_a_notebook(tmp_path, monkeypatch):
    """The blocks of docs/python.md, one after another in the same interpreter, whose output goes to a
    stream that is no file."""
    make_run(tmp_path / "runs/my_photos")
    for name in ("mugs/1", "mugs/2", "cups/1", "cups/2"):
        put(tmp_path / f"album/{name}.jpg", encode(sum(map(ord, name)), kind="JPEG"))
    monkeypatch.chdir(tmp_path)
    names = {}
    found = []
    for block in blocks(FROM_PYTHON.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block.text, names)  # noqa: S102
        found.append(printed.getvalue())
    loaded, embedded, searched, whole = found
    assert loaded == "32 pixels, 16 dimensions\n"
    assert embedded == ""
    assert names["X"].shape == (4, 16)
    first, *others = searched.splitlines()
    assert re.fullmatch(r"1\.000 album/cups/1\.jpg", first)
    assert len(others) == 2
    # the same neighbours from the programs, which leave out the query
    assert re.findall(r"(\w+/\d\.jpg)  \w+$", whole, re.MULTILINE)[:2] == [
        line.partition(" album/")[2] for line in others
    ]


def test_a_block_of_a_page_has_few_lines():
    for block in blocks(FROM_PYTHON.read_text()):
        lines = [x for x in block.text.splitlines() if x and not x.startswith(("import", "from"))]
        assert len(lines) <= 5


def without_blocks(page):
    return FENCE.sub("", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_what_a_page_names_exists(page):
    """Links, paths of the project, make targets, and the programs of commands in a sentence."""
    text = without_blocks(page)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for span in re.findall(r"`([^`\n]+)`", text):
        for path in re.findall(
            r"(?:^|\s)((?:dml|shards|launch|configs|tests|docs|benchmarks)/\S*)", span
        ):
            if not re.search(r"[A-Z*{]|\.\.\.", path.replace("README", "")):
                path = ROOT / path.rstrip(":,;")
                assert path.exists() or path.with_suffix(".py").exists(), path
        if re.fullmatch(r"test_\w+", span):
            assert f"def {span}(" in TESTS, span
        if span.startswith("make "):
            run(["make", "-n", *span.split()[1:]], ROOT)
        for module in re.findall(r"python -m (dml[\w.]*)", span):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=title)
def test_the_header_of_a_config_names_files_that_exist(path):
    """And the command in it is of that config itself."""
    header = "".join(re.findall(r"^#.*\n", path.read_text(), re.MULTILINE))
    for name in re.findall(
        r"\b(?:configs|docs|dml|launch|shards)/[\w/*-]+\.(?:yaml|json|md|py)", header
    ):
        assert "NAME" in name or list(ROOT.glob(name)), name
    if "paper" not in path.parts:  # tables, which are not run
        assert f" {title(path)}" in header, "the header gives no command with this config"


@pytest.fixture(scope="module")
def whole_batch(followed):
    """The weights after the steps of docs/your-loop.md by `dense_loss`, on one process."""
    here = followed(ROOT / "docs/your-loop.md")
    page = runpy.run_path(str(here / "ddp_loop.py"))
    model = page["network"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = make_loss("multi_similarity", alpha=2, beta=40, lam=0.5, eps=0.1)
    for step in range(3):
        inputs, labels = page["global_batch"](step)
        optimizer.zero_grad()
        dense_loss(loss, normalize(model(inputs)), labels).backward()
        optimizer.step()
    return here, page["network"]().state_dict(), model.state_dict()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp_loop", "accelerate_loop", "pml_loop"])
def test_your_loop_has_the_gradient_of_the_whole_batch(whole_batch, name):
    """Plain SGD: what the weights have moved is the sum of the gradients."""
    here, before, expected = whole_batch
    found = torch.load(here / f"{name}.pt")
    assert set(found) == set(expected)
    for key in expected:
        moved = expected[key] - before[key]
        assert moved.abs().max() > 1e-3, "nothing was learned"
        torch.testing.assert_close(found[key] - before[key], moved, rtol=1e-4, atol=1e-6)


@pytest.mark.processes
def test_your_loop_with_two_towers_has_the_gradient_of_the_whole_batch(whole_batch):
    here, _, _ = whole_batch
    sys.path.insert(0, str(here))
    try:
        page = runpy.run_path(str(here / "towers_loop.py"))
    finally:
        sys.path.remove(str(here))
    model, before = page["Towers"](), page["Towers"]().state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = torch.arange(32)
    for step in range(3):
        (x, _), (y, _) = (page["global_batch"](n) for n in (step, step + 100))
        X, Y = model(x, y)
        optimizer.zero_grad()
        dense_loss_of_towers(make_loss("info_nce", tau=0.1), X, pairs, Y, pairs).backward()
        optimizer.step()
    found = torch.load(here / "towers_loop.pt")
    for key, expected in model.state_dict().items():
        moved = expected - before[key]
        assert moved.abs().max() > 1e-3, "nothing was learned"
        torch.testing.assert_close(found[key] - before[key], moved, rtol=1e-4, atol=1e-6)


# ---- the rules above can fail ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wget http://example.com/x", "a command that no test can run"),
        ("python dml/nothing.py", "a command that no test can run"),
        ("dml nothing", "a command that no test can run"),
        (
            "python -m dml.plan --config configs/sop_bs1000.yaml --set batch.clases=3",
            "did you mean",
        ),
        ("make nonsense", "No rule to make target"),
        ("pip install -e '.[nonsense]'", "nonsense"),
    ],
)
def test_a_command_that_does_not_work_is_seen(text, words, tmp_path):
    for name in ("dml", "shards", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    with pytest.raises(AssertionError, match=re.escape(words)):
        follow_command(text, ROOT / "README.md", tmp_path, None)


def test_blocks_in_lists_and_behind_prompts_are_read():
    text = "1. Do\n\n   ```bash\n   make test   # all\n   python a.py \\\n     --b\n   ```\n"
    text += "\n```console\n$ make demo\nstep 1\n```\n"
    listed, prompted = blocks(text)
    assert [c.split() for c in commands(listed)] == [
        ["make", "test", "#", "all"],
        ["python", "a.py", "--b"],
    ]
    assert list(commands(prompted)) == ["make demo"]
