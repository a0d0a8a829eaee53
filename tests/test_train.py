"""Whole runs on the bundled icons, as users start them. Oracle: the same run, undisturbed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from fleet import ROOT, WORKERS, environment, free_port, start
from pictures import make_folder
from safetensors.torch import load_file, save_file

from dml.data.batches import EvalBatches
from dml.inference.trained import load_trained
from dml.recall import recall_at_k
from dml.run_folder.checkpoint import read_last
from dml.run_folder.journal import METRICS, TIMING
from dml.train import main
from shards.build import main as build
from shards.index import load_index

TRAIN = ROOT / "dml" / "train.py"
ICONS = ROOT / "shards" / "bundled" / "icons-mini"
BASE = [
    "--config",
    str(ROOT / "configs" / "icons_mini.yaml"),
    "--set",
    f"data.shards={ICONS}",
    "data.workers=0",
    "batch.classes=16",
    "optim.schedule=cosine",
    "model.embedding_size=32",
    "length.steps=30",
    "run.log_steps=1",
    "eval.every_steps=null",
    "eval.untrained=false",
]
CONVNET = ["optim.lr=1e-4"]
FROZEN = [
    "optim.lr=1e-5",
    "model.backbone=efficientnet_lite0",
    "model.weights=pretrained",
    "data.size=32",
    "batch.classes=8",
]


def train(processes, folder, *sets, timeout=280):
    """Run to the end; all processes must end alike. Returns the run's folder and their output."""
    ended = start(TRAIN, processes, *BASE, f"run.dir={folder}", *sets, timeout=timeout)
    codes = {process.returncode for process in ended}
    assert codes == {0}, "\n".join(process.stderr for process in ended)
    return Path(folder) / "icons_mini"


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]


def content(run):
    """What must be the same to the bit."""
    return (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()


# ---- the same run for any number of processes -----------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, made when first asked for."""
    known = {}

    def run(*sets):
        if sets not in known:
            known[sets] = train(1, tmp_path_factory.mktemp("alone"), *sets)
        return known[sets]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "processes", "micro_batch"),
    [
        pytest.param(CONVNET, 1, 10, id="convnet-1-10"),
        pytest.param(CONVNET, 2, None, id="convnet-2"),
        pytest.param(CONVNET, 4, 5, id="convnet-4-5"),
        pytest.param(FROZEN, 2, None, id="frozen-2"),
        pytest.param(FROZEN, 4, 2, id="frozen-4-2"),
    ],
)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp64", 1e-10)])
def test_the_loss_curve_does_not_depend_on_the_processes(
    alone, model, precision, tolerance, processes, micro_batch, tmp_path
):
    how = [*model, f"engine.precision={precision}"]
    expected = losses(alone(*how))
    micro = [] if micro_batch is None else [f"engine.micro_batch={micro_batch}"]
    found = losses(train(processes, tmp_path, *how, *micro))
    assert len(found) == len(expected) == 30
    assert found == pytest.approx(expected, rel=tolerance)
    assert len({*expected}) == 30, "nothing was learned"


# ---- interrupted runs -----------------------------------------------------------------------------

EVENTFUL = [
    "save.every_minutes=1e-6",  # after every step
    "eval.every_steps=10",
    "eval.validation_classes=0.1",
    "eval.untrained=true",
]
DDP = ["--config_file", str(ROOT / "configs/accelerate/cpu_x2.yaml")]
ZERO2, ZERO3 = (
    ["--config_file", str(ROOT / f"configs/accelerate/zero{stage}.yaml"), "--num_processes", "2"]
    for stage in (2, 3)
)


class Launched:
    """A run under `accelerate launch`, or without it so that each process has its own exit code."""

    def __init__(self, how, folder, *sets, machines=None, program=(TRAIN,), base=BASE):
        self.run, self.log = Path(folder) / "icons_mini", Path(folder) / f"{time.monotonic_ns()}"
        Path(folder).mkdir(exist_ok=True)
        port, command = str(free_port()), [*program, *base, f"run.dir={folder}", *EVENTFUL, *sets]
        if isinstance(how, int):
            launcher = [sys.executable]
            ranks = [
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(how),
                    "LOCAL_WORLD_SIZE": str(how),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                for rank in range(how)
            ]
        else:
            launcher = ["accelerate", "launch", "--main_process_port", port, *how]
            ranks = [{} if how is DDP else {"DS_ACCELERATOR": "cpu"}]
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    [*launcher, *map(str, command)],
                    cwd=cwd,
                    env=environment(**rank),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for rank, cwd in zip(ranks, machines or [ROOT] * len(ranks), strict=True)
            ]

    @property
    def said(self):
        return self.log.read_text()

    def until(self, steps, evaluations=0):
        """Wait for so many lines of metrics."""
        deadline, metrics = time.monotonic() + 200, self.run / "metrics.jsonl"
        while time.monotonic() < deadline and all(p.poll() is None for p in self.processes):
            text = metrics.read_text() if metrics.exists() else ""
            if text.count('"loss"') >= steps and text.count('"split"') >= evaluations:
                return self
            time.sleep(0.01)
        pytest.fail(f"step {steps} never came: {self.said}")

    def rank(self, number):
        """The process of a rank."""
        for process in self.processes:
            top = psutil.Process(process.pid)
            for child in (top, *top.children(recursive=True)):
                if child.environ().get("RANK") == str(number) and str(TRAIN) in child.cmdline():
                    return child
        pytest.fail(f"no rank {number}")

    def end(self, timeout=200):
        """The exit codes; a process that does not end is a failure."""
        deadline = time.monotonic() + timeout
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        finally:
            for p in self.processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    known = {}

    def of(how):
        if str(how) not in known:
            launched = Launched(how, tmp_path_factory.mktemp("undisturbed"))
            assert set(launched.end()) == {0}, launched.said
            known[str(how)] = content(launched.run)
        return known[str(how)]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank"), [(DDP, 0), (DDP, 1), (ZERO2, 1)], ids=["ddp-0", "ddp-1", "zero2-1"]
)
def test_killed_at_any_step_the_same_command_gives_the_same_bits(undisturbed, how, rank, tmp_path):
    expected = undisturbed(how)
    launched = Launched(how, tmp_path)
    launched.until(random.Random(f"{how}{rank}").randrange(2, 25)).rank(rank).kill()
    assert launched.end() != [0]
    assert not (launched.run / "result.json").exists()
    again = Launched(how, tmp_path)
    assert again.end() == [0], again.said
    assert "continuing" in again.said
    assert content(again.run) == expected


@pytest.mark.slow
@pytest.mark.parametrize("point", range(6))
def test_killed_in_the_middle_of_a_checkpoint(undisturbed, point, tmp_path):
    """A checkpoint syncs metrics.jsonl, two files of tensors, its state and two folders; the process
    that writes is killed at one of these after some checkpoints."""
    expected = undisturbed(2)
    dying = (WORKERS / "dying.py", 40 + point)
    launched = Launched(2, tmp_path, program=dying)
    assert 0 not in launched.end(), launched.said
    again = Launched(2, tmp_path)
    assert again.end() == [0, 0], again.said
    assert "continuing" in again.said
    assert content(again.run) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "sent", "rank"), [(2, signal.SIGTERM, 1), (3, signal.SIGUSR2, 0)]
)
def test_a_signal_to_one_process_saves_and_ends_all(undisturbed, processes, sent, rank, tmp_path):
    """As a scheduler sends it some time before it kills; here to one process alone."""
    expected = undisturbed(processes)
    launched = Launched(processes, tmp_path, "save.every_minutes=10")
    launched.until(12).rank(rank).send_signal(sent)
    assert launched.end(timeout=30) == [75] * processes, launched.said
    assert launched.said.count("the same command continues") == 1
    (saved,) = (launched.run / "checkpoints").glob("step-*")
    again = Launched(processes, tmp_path, "save.every_minutes=10")
    assert set(again.end()) == {0}, again.said
    assert f"after step {int(saved.name[5:])}" in again.said
    assert content(again.run) == expected


@pytest.mark.slow
def test_a_signal_to_every_process_of_the_job_saves_too(tmp_path):
    """The loader's workers included, as Slurm sends it."""
    launched = Launched(1, tmp_path, "data.workers=2", "save.every_minutes=10")
    launched.until(5)
    os.killpg(launched.processes[0].pid, signal.SIGTERM)
    assert launched.end(timeout=30) == [75], launched.said
    assert "Traceback" not in launched.said
    assert len(list((launched.run / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_a_second_signal_does_not_spoil_the_saving(tmp_path):
    program = (WORKERS / "slow_saving.py",)
    launched = Launched(1, tmp_path, "save.every_minutes=10", program=program)
    launched.until(5).processes[0].send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 30
    while "saving" not in launched.said and time.monotonic() < deadline:
        time.sleep(0.05)
    launched.processes[0].send_signal(signal.SIGTERM)
    assert launched.end(timeout=30) == [75], launched.said
    assert len(list((launched.run / "checkpoints").glob("step-*"))) == 1


def test_a_signal_in_the_set_up_is_an_interruption_too(tmp_path):
    launched = Launched(1, tmp_path)
    deadline = time.monotonic() + 60
    while not launched.run.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    launched.processes[0].send_signal(signal.SIGTERM)
    assert launched.end(timeout=60) == [75], launched.said


@pytest.mark.slow
def test_machines_need_not_share_the_folder_of_the_run(undisturbed, tmp_path):
    """Only the first process looks into it."""
    machines = [tmp_path / "0", tmp_path / "1"]
    for machine in machines:
        machine.mkdir()
    sets = ["run.dir=runs"]
    launched = Launched(2, tmp_path, *sets, machines=machines)
    launched.run = machines[0] / "runs" / "icons_mini"
    launched.until(12).rank(0).send_signal(signal.SIGTERM)
    assert launched.end() == [75, 75], launched.said
    again = Launched(2, tmp_path, *sets, machines=machines)
    assert again.end() == [0, 0], again.said
    assert content(launched.run) == undisturbed(2)
    assert not (machines[1] / "runs").exists()


@pytest.mark.slow
def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path):
    """The evaluation of one image at a time takes long; it is given up, and made up for."""
    slow = ["engine.micro_batch=1", "save.every_minutes=10", "length.steps=10"]
    launched = Launched(1, tmp_path, *slow)
    launched.until(10).rank(0).send_signal(signal.SIGTERM)
    assert launched.end(timeout=30) == [75], launched.said
    assert [line for line in lines(launched.run) if line.get("split") == "validation"] == []
    again = Launched(1, tmp_path, *slow)
    assert again.end() == [0], again.said
    assert [line["step"] for line in lines(again.run) if line.get("split") == "validation"] == [10]


@pytest.mark.slow
def test_a_run_may_go_on_with_other_processes_and_engines(tmp_path):
    """Some steps with three processes, some under ZeRO-3 with two, and the rest with one."""
    how = [*CONVNET, "eval.untrained=false"]
    expected = Launched(1, tmp_path / "alone", *how)
    assert expected.end() == [0], expected.said
    for processes, step in ((3, 6), (ZERO3, 14)):
        launched = Launched(processes, tmp_path / "parts", *how)
        launched.until(step).rank(0).send_signal(signal.SIGTERM)
        assert 0 not in launched.end(), launched.said
    rest = Launched(1, tmp_path / "parts", *how)
    assert rest.end() == [0], rest.said
    assert losses(rest.run) == pytest.approx(losses(expected.run), rel=1e-4)
    before, after = (load_file(x.run / "model.safetensors") for x in (expected, rest))
    assert all((before[k] - after[k]).abs().max() < 1e-3 for k in before)


# ---- what is written, and chosen -------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One process, with everything on; called as a function."""
    folder = tmp_path_factory.mktemp("finished")
    sets = ["length.steps=20", "eval.validation_classes=0.2", "eval.every_steps=5"]
    return train(1, folder, *sets, "eval.untrained=true", "run.log_steps=2"), sets


def test_the_folder_of_a_run(finished):
    run, _ = finished
    assert {path.name for path in run.iterdir()} >= {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "timing.jsonl",
        "result.json",
        "model.safetensors",
        "checkpoints",
        "projector_config.pbtxt",
    }
    assert json.loads((run / "plan.json").read_text())["steps"] == 20
    steps = [line["step"] for line in lines(run) if "loss" in line]
    assert steps == list(range(2, 21, 2))
    assert [(line["step"], line["split"]) for line in lines(run) if "split" in line][:-1] == [
        (0, "test"),
        *((step, "validation") for step in (5, 10, 15, 20)),
    ]


def test_the_best_step_by_the_validation_classes_is_reported(finished):
    run, _ = finished
    result = json.loads((run / "result.json").read_text())
    tried = {x["step"]: x["recall@1"] for x in lines(run) if x.get("split") == "validation"}
    best = max(tried, key=lambda step: (tried[step], -step))
    assert result["step"] == best
    assert result["validation_recall@1"] == tried[best]
    final = lines(run)[-1]
    assert (final["step"], final["split"]) == (best, "test")
    assert final["recall@1"] == result["recall@1"]
    assert result["untrained"]["recall@1"] == lines(run)[0]["recall@1"]
    assert (result["images"], result["world_size"]) == (best * 48, 1)
    kept = load_file(run / "checkpoints" / f"best-{best:08d}" / "model.safetensors")
    assert all(torch.equal(x, kept[k]) for k, x in load_file(run / "model.safetensors").items())


def test_the_reported_recall_is_that_of_the_written_model(finished):
    """Oracle: the model in the run's folder, on all test images at once."""
    run, _ = finished
    model, index = load_trained(run), load_index(ICONS)
    rows, labels = index.positions("test"), index.labels("test")
    images, _ = EvalBatches(index, rows, labels, model.spec, len(rows))[0]
    with torch.no_grad():
        found = recall_at_k(model(images), torch.from_numpy(labels), [1, 10])
    result = json.loads((run / "result.json").read_text())
    assert {1: result["recall@1"], 10: result["recall@10"]} == pytest.approx(found, abs=0.003)


def test_tensorboard_reads_every_scalar(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(finished[0])).Reload()
    tags = found.Tags()
    assert set(tags["scalars"]) >= {*METRICS.values(), *TIMING.values()}
    assert set(tags["scalars"]) >= {"validation/recall@1", "test/recall@1"}
    assert set(tags["images"]) == {"validation/nearest", "test/nearest"}
    assert set(tags["histograms"]) == {
        "pairs/positive_similarities",
        "pairs/negative_similarities",
        "pairs/log10_weights",
    }
    assert all(0 <= e.value <= 1 for e in found.Scalars("pairs/anchors_mined"))


def test_a_finished_run_is_not_trained_again(finished):
    run, sets = finished
    before = {name: (run / name).stat().st_mtime_ns for name in ("metrics.jsonl", "result.json")}
    more = ["eval.untrained=true", "run.log_steps=2"]
    (ended,) = start(TRAIN, 1, *BASE, f"run.dir={run.parent}", *sets, *more)
    assert ended.returncode == 0
    assert "is finished already" in ended.stdout
    assert before == {name: (run / name).stat().st_mtime_ns for name in before}


def test_a_run_killed_in_its_last_evaluation_still_evaluates(finished, tmp_path):
    run, sets = finished
    copy = tmp_path / "icons_mini"
    shutil.copytree(run, copy)
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").unlink()
    (copy / "model.safetensors").unlink()
    train(1, tmp_path, *sets, "eval.untrained=true", "run.log_steps=2")
    again = json.loads((copy / "result.json").read_text())
    assert {**again, "seconds": 0} == {**result, "seconds": 0}
    assert content(copy) == content(run)


def test_queries_search_a_gallery(tmp_path):
    """As In-Shop. Oracle: recall_at_k of the written model's embeddings."""
    make_folder(tmp_path / "images", classes=6, splits=("train", "query", "gallery"))
    shards = tmp_path / "shards"
    assert build(["folder", "--root", str(tmp_path / "images"), "--out", str(shards)]) == 0
    sets = ["data.dataset=folder", f"data.shards={shards}", "batch.classes=6", "length.steps=3"]
    run = train(2, tmp_path / "runs", *sets, "eval.ks=[1,2,4]")
    model, index = load_trained(run), load_index(shards)

    def embedded(split):
        rows, labels = index.positions(split), index.labels(split)
        images, _ = EvalBatches(index, rows, labels, model.spec, len(rows))[0]
        with torch.no_grad():
            return model(images), torch.from_numpy(labels)

    expected = recall_at_k(*embedded("query"), [1, 2, 4], *embedded("gallery"))
    result = json.loads((run / "result.json").read_text())
    assert {k: result[f"recall@{k}"] for k in expected} == expected


def test_patience_ends_a_run_that_no_longer_improves(tmp_path):
    """A rate too small to change anything: the first evaluation stays the best."""
    sets = [
        "optim.lr=1e-12",
        "eval.validation_classes=0.2",
        "eval.every_steps=2",
        "eval.patience=3",
        "eval.ks=[10]",
    ]
    run = train(1, tmp_path, *sets)
    assert [x["step"] for x in lines(run) if x.get("split") == "validation"] == [2, 4, 6, 8]
    result = json.loads((run / "result.json").read_text())
    assert (result["step"], result["trained_steps"]) == (2, 8)
    assert result["recall@1"] <= result["recall@10"]


# ---- mistakes ---------------------------------------------------------------------------------------


def refused(capsys, *sets, config=None):
    """The one sentence with which main refuses."""
    argv = list(BASE)
    if config is not None:
        argv[1] = str(config)
    assert main([*argv, *sets]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.startswith("dml/train.py: ")
    assert err.count("dml/train.py") == 1
    return err


@pytest.fixture
def fresh_accelerate():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.usefixtures("fresh_accelerate")
class TestMistakes:
    def test_a_missing_config(self, capsys, tmp_path):
        assert "nowhere.yaml: No such file" in refused(capsys, config=tmp_path / "nowhere.yaml")

    def test_an_unknown_key(self, capsys):
        assert "loss.betta" in refused(capsys, "loss.betta=1")

    def test_shards_that_are_not_there(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", f"data.shards={tmp_path}/none")
        assert f"{tmp_path}/none is not there: make it with shards/build.py" in said

    def test_weights_that_are_not_there(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", "model.weights=nowhere.pth")
        assert "nowhere.pth" in said

    def test_weights_of_another_architecture(self, capsys, tmp_path):
        other = tmp_path / "other.safetensors"
        save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, other)
        said = refused(capsys, f"run.dir={tmp_path}", f"model.weights={other}")
        assert "other.safetensors" in said
        assert "convnet" in said

    def test_more_classes_than_there_are(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", "batch.classes=501")
        assert "set batch.classes to at most 500" in said

    def test_a_folder_that_cannot_be_written(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        said = refused(capsys, f"run.dir={tmp_path}/file")
        assert "cannot be written: Not a directory; set run.dir to a folder that can" in said

    def test_a_folder_of_another_config(self, capsys, finished):
        run, sets = finished
        said = refused(capsys, f"run.dir={run.parent}", *sets, "optim.lr=0.5", "data.workers=3")
        assert "is a run of another config: " in said
        assert "optim.lr was 0.001 and is 0.5" in said
        assert "data.workers" not in said

    def test_a_folder_of_other_shards(self, capsys, finished, tmp_path):
        run, sets = finished
        shutil.copytree(run, tmp_path / "icons_mini")
        (tmp_path / "icons_mini" / "result.json").unlink()
        shards = tmp_path / "shards"
        shutil.copytree(ICONS, shards)
        rows = np.load(shards / "index.npy")
        rows[:2] = rows[[1, 0]]
        np.save(shards / "index.npy", rows)
        manifest = json.loads((shards / "manifest.json").read_text())
        manifest["index"]["sha256"] = sha256((shards / "index.npy").read_bytes()).hexdigest()
        (shards / "manifest.json").write_text(json.dumps(manifest))
        same = [*sets, "eval.untrained=true", "run.log_steps=2"]
        said = refused(capsys, f"run.dir={tmp_path}", *same, f"data.shards={shards}")
        assert "was trained on other shards" in said


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["batch.classes=16", "batch.per_class=4"], "64 images are not divisible by 3 processes"),
        (["data.shards=/nowhere"], "/nowhere is not there"),
        (["run.dir=/proc/nowhere"], "cannot be written"),
        (["model.weights=nowhere.pth"], "nowhere.pth"),
        (["engine.kind=triton"], "engine.kind=triton needs a CUDA GPU"),
    ],
    ids=["batch", "shards", "folder", "weights", "engine"],
)
def test_all_processes_stop_and_the_first_one_speaks(sets, sentence, tmp_path):
    ended = start(TRAIN, 3, *BASE, f"run.dir={tmp_path}", *sets, timeout=60)
    assert [process.returncode for process in ended] == [2, 2, 2]
    assert sentence in ended[0].stderr
    assert [process.stderr.count("dml/train.py") for process in ended] == [1, 0, 0]
    assert "Traceback" not in "".join(process.stderr for process in ended)


def test_a_mistake_that_one_process_meets_alone_ends_all(tmp_path):
    """Shards that are missing on the machine of one process."""
    shutil.copytree(ICONS, tmp_path / "0" / "shards")
    (tmp_path / "1").mkdir()
    machines = [tmp_path / "0", tmp_path / "1"]
    launched = Launched(2, tmp_path / "runs", "data.shards=shards", machines=machines)
    assert launched.end(timeout=60) == [2, 2], launched.said
    assert "shards is not there: make it with shards/build.py" in launched.said


def test_a_config_that_one_machine_does_not_have_ends_all(tmp_path):
    machines = [tmp_path / "0", tmp_path / "1"]
    for machine in machines:
        machine.mkdir()
    (machines[0] / "icons_mini.yaml").write_text(
        (ROOT / "configs" / "icons_mini.yaml")
        .read_text()
        .replace("presets", f"{ROOT}/configs/presets")
    )
    program = (TRAIN, "--config", "icons_mini.yaml", "--set", f"data.shards={ICONS}")
    launched = Launched(2, tmp_path / "runs", machines=machines, program=program, base=())
    assert launched.end(timeout=60) == [2, 2], launched.said
    assert "icons_mini.yaml: No such file" in launched.said


def test_two_runs_do_not_share_a_folder(tmp_path):
    launched = Launched(1, tmp_path).until(1)
    other = Launched(1, tmp_path)
    assert other.end(timeout=60) == [2]
    assert "another process is training in" in other.said
    assert launched.end() == [0], launched.said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_disk_that_fills_up_ends_all_processes(tmp_path):
    """Too small for the second retrieval picture."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if subprocess.run(size, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        sets = [f"run.dir={disk}", "save.every_minutes=10", "eval.every_steps=2"]
        launched = Launched(2, tmp_path, *sets, "eval.validation_classes=0")
        assert launched.end(timeout=100) == [2, 2], launched.said
        # after what TensorBoard's own thread has to say
        last = launched.said.splitlines()[-1]
        assert "cannot be written: No space left on device; make room" in last
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_ends_all_processes(workers, tmp_path):
    """One image of the second process's share of some batch."""
    shutil.copytree(ICONS, tmp_path / "shards")
    index = load_index(tmp_path / "shards")
    with open(index.shards[0], "r+b") as tar:
        for row in index.positions("train")[:700]:
            tar.seek(index.rows[row]["offset"])
            tar.write(b"damaged!")
    sets = [f"data.shards={tmp_path}/shards", f"data.workers={workers}", "eval.untrained=false"]
    launched = Launched(2, tmp_path, *sets)
    assert launched.end(timeout=60) == [2, 2], launched.said
    assert "cannot be decoded" in launched.said
    assert "Traceback" not in launched.said
    assert launched.said.count("dml/train.py: ") == 1


# ---- divergence -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tmp_path):
    """From step 8 on a rate that no network survives."""
    wild = ["optim.name=sgd", "optim.schedule=step", "optim.milestones=[7]", "optim.gamma=1e38"]
    launched = Launched(2, tmp_path, *wild)
    assert launched.end() == [3, 3], launched.said
    assert "training diverged between step" in launched.said
    assert "Traceback" not in launched.said
    last, damaged = read_last(launched.run / "checkpoints")
    assert damaged == []
    assert last.state["step"] in (7, 8)
    assert all(x.isfinite().all() for x in last.tensors["model.safetensors"].values())


# ---- damaged checkpoints ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_said_so(undisturbed, tmp_path):
    expected = undisturbed(2)
    launched = Launched(2, tmp_path)
    launched.until(12).rank(0).send_signal(signal.SIGTERM)
    assert launched.end() == [75, 75]
    before, last = sorted((launched.run / "checkpoints").glob("step-*"))
    (last / "model.safetensors").write_bytes((last / "model.safetensors").read_bytes()[:-100])
    again = Launched(2, tmp_path)
    assert again.end() == [0, 0], again.said
    assert f"passed over: {last}: model.safetensors differs from its checksum" in again.said
    assert f"continuing {again.run} after step {int(before.name[5:])}" in again.said
    assert content(again.run) == expected
