"""What new users do wrong, and the sentence that they get: what is wrong, where, and what to do.

A row is a command as it would be typed in the project's folder, and its sentence. HERE is a folder with
photos, a run that has begun, two finished ones, the embeddings of one, and the files in FILES.
"""

import re
import shlex
import shutil
import subprocess
from importlib import import_module

import pytest
from fleet import ROOT
from pictures import make_folder, put
from test_search import make_run

from dml import embed, train
from dml.config import load, to_yaml
from shards import build

ICONS_MINI = ROOT / "configs/icons_mini.yaml"
CONFIG = "--config configs/icons_mini.yaml"
TRAIN = f"dml/train.py {CONFIG} --set run.dir=HERE/runs"
PLAN = f"dml.plan {CONFIG}"
FILES = {
    "twice.yaml": "optim:\n  lr: 1e-4\n  schedule: constant\n  lr: 1e-3\n",
    "tab.yaml": "optim:\n\tlr: 1e-4\n",
    "list.yaml": "- optim\n- lr\n",
    "flat.yaml": "learning_rate: 1e-4\n",
    "base.yaml": "base: sop.yaml\n",
    "weights.pth": "<html>404: not found</html>",
    "file": "",
    "empty/.keep": "",
}

MISTAKES = [
    # ---- files and keys of a config
    ("dml.plan --config nowhere.yaml", "nowhere.yaml: No such file or directory; check the path"),
    (f"{PLAN} HERE/tab.yaml", "tab.yaml: line 2 is not YAML: found character '\\t'"),
    (
        f"{PLAN} HERE/twice.yaml",
        "twice.yaml: line 4 is not YAML: the key 'lr' is there twice, first in line 2",
    ),
    (
        f"{PLAN} HERE/list.yaml",
        "list.yaml: is not a mapping of sections; a config is a YAML file of",
    ),
    (
        f"{PLAN} HERE/flat.yaml",
        "learning_rate = 0.0001 (HERE/flat.yaml): unknown section; did you mean optim.lr?",
    ),
    (f"{PLAN} HERE/base.yaml", "did you mean extends?"),
    (f"{PLAN} --set learning_rate=1e-4", "must be section.key=value; did you mean optim.lr?"),
    (f"{PLAN} --set optim.learning_rate=1e-4", "unknown key; did you mean optim.lr?"),
    (f"{PLAN} --set optim.epochs=30", "unknown key; did you mean length.epochs?"),
    (f"{PLAN} --set batch.size=64", "did you mean batch.classes and batch.per_class?"),
    (f"{PLAN} --set data.num_workers=4", "unknown key; did you mean data.workers?"),
    (
        f"{PLAN} --set loss.margin=0.1",
        "loss.margin = 0.1 (--set): unknown parameter; did you mean eps?",
    ),
    (f"{PLAN} --set loss.name=MultiSimilarity", "unknown loss; did you mean multi_similarity?"),
    (f"{PLAN} --set model.backbone=resnet-50", "did you mean resnet50?"),
    # ---- values
    (f"{PLAN} --set optim.lr=fast", "optim.lr = 'fast' (--set): must be a finite number, above 0"),
    (f"{PLAN} --set optim.lr = 1e-4", "--set optim.lr: must be section.key=value; for example"),
    (
        f"{PLAN} --set length.steps=100 length.epochs=3",
        "must have exactly one of steps, epochs, images; for example length.steps=3000",
    ),
    (f"{PLAN} --set eval.patience=3", "for example eval.validation_classes=0.1"),
    (f"{PLAN} --set batch.classes=501", "set batch.classes to at most 500"),
    (
        f"{PLAN} --set batch.per_class=1",
        "batch.per_class = 1 (--set): must be at least 2: without two towers",
    ),
    (
        f"{PLAN} --processes 7",
        "240 images are not divisible by 7 processes; set batch.classes=77 or",
    ),
    (f"{PLAN} --processes 2 --set model.batchnorm=local", "set model.batchnorm=frozen"),
    # ---- starting a training
    (f"{TRAIN} data.shards=HERE/none", "none is not there: make it with shards/build.py"),
    (
        f"{TRAIN} run.dir=HERE/file",
        "cannot be written: Not a directory; set run.dir to a folder that",
    ),
    ("dml/train.py --config your_imgs", "did you mean your_images? check the path"),
    (f"{TRAIN} model.weights=none.pth", "none.pth): there is no such file; give a .safetensors"),
    (f"{TRAIN} model.weights=HERE/weights.pth", "cannot be read as weights ("),
    (
        f"{TRAIN} model.backbone=resnet50 model.weights=pretrained",
        "no package has weights of resnet50; give the path of resnet50-0676ba61.pth of torchvision",
    ),
    (
        f"{TRAIN} run.name=begun optim.lr=0.5",
        "begun is a run of another config: optim.lr was 0.001 and is 0.5",
    ),
    (
        f"{TRAIN} run.name=begun length.steps=600",
        "with optim.schedule=cosine the learning rate of every step depends on the length",
    ),
    # ---- shards, embedding, searching, studies
    ("shards/build.py folder --root HERE/none --out HERE/out", "none is not there"),
    ("shards/build.py folder --root HERE/photos --out HERE/photos", "photos exists: remove it, or"),
    ("dml/embed.py HERE/none HERE/photos --out HERE/out", "there is no run's folder HERE/none"),
    ("dml/embed.py HERE/photos HERE/photos --out HERE/out", "photos has no config.yaml: give the"),
    ("dml/embed.py HERE/runs/done HERE/empty --out HERE/out", "empty has no images"),
    (
        "dml/embed.py HERE/runs/done HERE/photos --out HERE/embedded",
        "embedded holds embeddings already: --overwrite replaces them, or give another --out",
    ),
    ("dml/search.py HERE/runs/done HERE/embedded HERE/none.jpg", "none.jpg is not there: give an"),
    (
        "dml/search.py HERE/runs/done HERE/photos HERE/photos",
        "photos is not a folder of embeddings: make one with dml embed",
    ),
    (
        "dml/search.py HERE/runs/other HERE/embedded HERE/photos",
        "search with that run, or embed the images with this one",
    ),
    (
        "launch/slurm.py --sweep configs/sweeps/icons_ablation.yaml --only bs20 --dry-run",
        "--only bs20: no such run; ",
    ),
    ("launch/report.py HERE/none --out HERE/out", "none is not a folder; give the folder of the"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    for name, text in FILES.items():
        put(folder / name, text)
    make_folder(folder / "photos")
    put(folder / "runs/begun/config.yaml", to_yaml(load(ICONS_MINI, ["run.name=begun"])))
    for seed, name in enumerate(("done", "other")):
        make_run(folder / "runs" / name, seed)
    made = [str(folder / "runs/done"), str(folder / "photos"), "--out", str(folder / "embedded")]
    assert embed.main([*made, "--workers", "0"]) == 0
    return folder


def words_of(command, here):
    return [word.replace("HERE", str(here)) for word in shlex.split(command)]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(("command", "sentence"), MISTAKES)
def test_a_mistake_gets_a_sentence(command, sentence, here, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = words_of(command, here)
    name = program.removesuffix(".py").replace("/", ".")
    before = sorted(here.rglob("*"))
    capsys.readouterr()
    try:
        code = import_module(name).main(arguments)
    except SystemExit as error:  # of argparse
        code = error.code
    said = capsys.readouterr()
    assert code == 2
    assert sentence.replace("HERE", str(here)) in said.err
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) <= 4, "a line per problem, and one before them"
    left = [path for path in sorted(here.rglob("*")) if path not in before]
    assert [path for path in left if path.is_file() and path.name != ".lock"] == []


def test_there_are_at_least_twenty():
    assert len({sentence for _, sentence in MISTAKES}) >= 20


def test_a_folder_that_is_read_only(small_disk, here, capsys):
    """The sentence names what the user gave, not the names under which we write."""
    disk = small_disk("1m")
    shutil.copytree(here / "runs/begun", disk / "runs/begun")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for program, arguments, sentence in [
        (
            build,
            ["folder", "--root", str(here / "photos"), "--out", f"{disk}/out", "--workers", "1"],
            f"{disk}/out was not built: Read-only file system; choose another --out",
        ),
        (
            embed,
            [str(here / "runs/done"), str(here / "photos"), "--out", f"{disk}/out"],
            f"{disk}/out cannot be made: {disk} cannot be written; give another --out",
        ),
        (
            train,
            ["--config", str(ICONS_MINI), "--set", f"run.dir={disk}/runs", "run.name=begun"],
            f"the run's folder {disk}/runs/begun cannot be written: Read-only file system; set",
        ),
    ]:
        assert program.main(arguments) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert not re.search(r"\.partial|\.writing|\.lock|Errno", said)
