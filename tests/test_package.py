"""The wheel brings all that the programs need: `dml` works in a folder that has nothing else."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from fleet import ROOT, environment

from dml import __version__

PARTS = ("configs", "launch", "shards", "pyproject.toml", "README.md", "LICENSE")
DEMO = ["length.steps=2", "batch.classes=8", "data.size=16", "eval.every_steps=null"]


def files(folder):
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(words, **how):
    ended = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, **how
    )
    assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the build leaves nothing in the project."""
    source = tmp_path_factory.mktemp("source")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dml", source / "dml", symlinks=True, ignore=without)
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=without)
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    run([sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", out, source])
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """dml(*words, cwd): the installed command, whose packages are not those of the project."""
    site = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-cache-dir", "--target", site]
    run([sys.executable, "-m", "pip", "install", "-q", *options, wheel])

    def dml(*words, cwd):
        variables = environment(PYTHONPATH=str(site))
        return run([site / "bin" / "dml", *words], cwd=cwd, env=variables, timeout=200)

    dml.site = site
    return dml


@pytest.mark.slow
def test_the_wheel_has_every_file_and_no_other_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        *("dml", "launch", "shards"),
        f"dml-{__version__}.dist-info",
    }
    ours = files("dml") | files("launch") | files("shards")
    configs = {f"dml/{name}" for name in files("configs")}
    assert names >= configs | {name for name in ours if not name.startswith("dml/configs")}
    assert {"dml/py.typed", "launch/py.typed", "shards/py.typed"} <= names
    assert "shards/bundled/icons-mini/LICENSE-Apache-2.0.txt" in names


@pytest.mark.slow
def test_the_installed_command_knows_its_version(installed, tmp_path):
    assert installed("--version", cwd=tmp_path) == f"dml {__version__}\n"


@pytest.mark.slow
def test_sweeps_and_their_configs_are_found(installed, tmp_path):
    sweep = ["sweep", "--sweep", "configs/sweeps/sop_batch_size.yaml", "--dry-run"]
    assert "bs1000-seed0" in installed(*sweep, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_installed_command_has_worker_processes(installed, tmp_path):
    """Each of them imports the program that started it."""
    bundled = installed.site / "shards" / "bundled" / "icons-mini"
    verified = installed("shards", "verify", bundled, "--workers", "2", cwd=tmp_path)
    assert "no problems" in verified


@pytest.mark.training
def test_the_demo_runs_in_an_empty_folder(installed, tmp_path):
    installed("demo", "--set", *DEMO, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run_folder = tmp_path / "runs" / "icons_mini"
    assert json.loads((run_folder / "result.json").read_text())["step"] == 2
    bundled = installed.site / "shards" / "bundled" / "icons-mini"
    assert f"shards: {bundled}" in (run_folder / "config.yaml").read_text()
    installed("report", "runs", "--out", "report", cwd=tmp_path)  # the paper's tables are there
    assert "is finished already" in installed("demo", "--set", *DEMO, cwd=tmp_path)
