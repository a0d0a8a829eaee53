"""The check for owners of GPUs, on the CPU with gloo, and with planted faults. It has never met a GPU."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from fleet import WORKERS, program, run
from runs import ICONS

from dml.gpu_check import exact, kill, main, stages
from dml.gpu_check.group import run_checks
from dml.gpu_check.kill import kill_lines
from dml.gpu_check.machine import machine_lines, topology
from dml.gpu_check.place import Sizes
from dml.gpu_check.rank import CHECKS
from dml.gpu_check.speed import loss_speed, seconds
from dml.gpu_check.verdict import FAILED, OK, SKIPPED, SLOW, VERDICTS, Line, as_json, page, within
from dml.gpu_check.waits import SAYS, count_line, error_line
from dml.gpw import GlobalPairLoss

CPU = torch.device("cpu")
SMALL = Sizes(
    rows=60,
    dimensions=8,
    speed_rows=(100,),
    speed_dimensions=16,
    backbone="convnet",
    pixels=16,
    images=8,
    gathered_mb=0.25,
    repeats=2,
    training_steps=100,
)


# ---- without a GPU ---------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main.main(["--json", str(out)]) == 2
    assert "there is no GPU here (torch 2" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("out", ["nowhere/out.json", "."])
def test_a_file_that_cannot_be_written_is_refused_first(out, tmp_path, capsys):
    assert main.main(["--json", str(tmp_path / out)]) == 2
    assert "cannot be written; name a file in a folder that can be" in capsys.readouterr().err


# ---- the program -----------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    """The program as it is, on two GPUs that it is told of, with canned checks."""
    asked = []

    def canned(checks, processes, sizes):
        asked.append((processes, tuple(checks)))
        for name in checks:
            yield Line(name, SLOW if "speed" in name else OK, "canned | text", {"log": "a\nb"})

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("dml.gpu_check.group.run_checks", canned)
    monkeypatch.setattr(
        "dml.gpu_check.kill.kill_lines", lambda *_: [Line("a killed process", FAILED, "it hung")]
    )
    return asked


def test_it_writes_a_page_and_json_with_a_verdict_per_line(two_gpus, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main.main(["--json", str(out)]) == 1, "something failed"
    said = capsys.readouterr().out
    found = json.loads(out.read_text())
    names = [line["name"] for line in found["lines"]]
    assert {check for _, checks in two_gpus for check in checks} == set(CHECKS), "none is forgotten"
    assert [processes for processes, _ in two_gpus] == [1, 2, 2]
    assert names[0] == "versions"
    assert names[-1] == "a killed process"
    assert all(line["verdict"] in VERDICTS for line in found["lines"])
    assert "failed  a killed process" in said
    assert found["summary"] in said
    text = out.with_suffix(".md").read_text()
    assert all(f"| {name} |" in text for name in names)
    assert "canned   text" in text, "a bar would break the table"
    assert "```text\na\nb\n```" in text


def test_nothing_failed(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("dml.gpu_check.kill.kill_lines", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main.main(["--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert "there is one GPU" in [line["text"] for line in found["lines"]]


def test_versions_and_topology():
    versions, gpus = machine_lines()
    assert versions.figures["torch"] == torch.__version__.split()[0]
    assert (gpus.verdict, gpus.text) == (SKIPPED, "torch sees none")
    assert topology(("echo", "GPU0 GPU1")).figures == {"topology": "GPU0 GPU1\n"}
    assert topology(("false",)).verdict == topology(("no-such-program",)).verdict == SKIPPED


def test_nan_is_not_within_any_goal():
    assert within("x", float("nan"), 1.0, "").verdict == FAILED
    assert within("x", 1.0, 1.0, "").verdict == OK
    assert json.loads(as_json([Line("x", OK, "")], {}))["summary"] == "1 ok"
    assert "# GPU check: 1 ok" in page([Line("x", OK, "")], {})


# ---- exactness -------------------------------------------------------------------------------------


def test_losses_and_recall_are_compared_with_float64():
    full, single, triton = exact.loss_lines(CPU, SMALL)
    assert (full.verdict, single.verdict, triton.verdict) == (OK, OK, SKIPPED)
    assert "needs a CUDA GPU" in triton.text
    assert len(full.figures["errors"]) == len(exact.variants()) > 20
    assert all(error < 1e-12 for error in full.figures["errors"].values())
    (recall,) = exact.recall_lines(CPU, SMALL)
    assert recall.verdict == OK


@pytest.mark.parametrize("sizes", [SMALL, Sizes()])
def test_every_loss_has_something_to_learn_in_the_batch(sizes):
    X, y = exact.batch(sizes.rows, sizes.dimensions, sizes.rows // 5)
    for name, loss in exact.variants().items():
        x = X.clone().requires_grad_()
        GlobalPairLoss(loss)(x, y).backward()
        assert x.grad.norm() > 1e-6, name


def test_a_gradient_that_is_wrong_in_one_row_is_a_failure(monkeypatch):
    class Wrong(exact.GlobalPairLoss):
        def forward(self, embeddings, labels):
            kept = embeddings.clone()
            kept[3] = embeddings[3].detach()
            return super().forward(kept, labels)

    monkeypatch.setattr(exact, "GlobalPairLoss", Wrong)
    full, single, _ = exact.loss_lines(CPU, SMALL)
    assert full.verdict == single.verdict == FAILED


def test_weights_that_were_rounded_are_a_failure():
    w = {"w": torch.randn(50)}
    rounded = {"w": w["w"].bfloat16().float()}
    plain = {"fp32": w, "bf16": w}
    assert stages.stage_line("ZeRO-3", plain, {"fp32": (w, w), "bf16": (w, w)}).verdict == OK
    found = stages.stage_line("ZeRO-3", plain, {"fp32": (w, w), "bf16": (rounded, w)})
    assert (found.verdict, found.text) == (FAILED, "saved weights are not the fp32 masters: w")
    other = {"w": w["w"] + 0.1}
    found = stages.stage_line("ZeRO-3", plain, {"fp32": (other, other), "bf16": (w, w)})
    assert found.verdict == FAILED
    assert "of DDP" in found.text


# ---- waits and speed -------------------------------------------------------------------------------


class Device:
    """Says of a wait what torch says of it, in the mode that was set."""

    def __init__(self):
        self.mode = "default"

    def set_mode(self, mode):
        self.mode = mode

    def wait(self):
        if self.mode == "warn":
            warnings.warn(f"called a {SAYS}", stacklevel=2)
        if self.mode == "error":
            raise RuntimeError(f"called a {SAYS}")


@pytest.mark.parametrize(("waits", "verdict"), [(0, OK), (2, OK), (3, FAILED)])
def test_waits_are_counted_and_placed(waits, verdict):
    device = Device()

    def step():
        warnings.warn("something else", stacklevel=1)
        for _ in range(waits):
            device.wait()

    found = count_line("waits", step, device.set_mode)
    assert found.verdict == verdict
    assert sum(found.figures["waits"].values()) == waits
    assert all(Path(__file__).name in where for where in found.figures["waits"])
    assert device.mode == "default"


def test_a_wait_before_the_end_of_a_step_is_named():
    device = Device()
    assert error_line("x", lambda: None, device.set_mode).verdict == OK
    found = error_line("x", device.wait, device.set_mode)
    assert found.verdict == FAILED
    assert f"{Path(__file__).name}:" in found.text
    assert device.mode == "default"

    def broken():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        error_line("x", broken, device.set_mode)


def test_what_is_timed_is_timed_in_turns():
    calls = []
    found = seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 2)
    assert calls == ["a", "b"] * 5
    assert found.keys() == {"a", "b"}


def test_the_loss_is_measured_against_two_products():
    lines = list(loss_speed(CPU, SMALL))
    assert [line.name for line in lines] == [
        "loss of 100, the authors' code",
        "loss of 100, the paper's text",
    ]
    for line in lines:
        assert line.figures["ratio"] == line.figures["loss"] / line.figures["products"]
        assert line.verdict == (OK if line.figures["ratio"] <= 1.5 else SLOW)


# ---- real processes --------------------------------------------------------------------------------


def in_forks(function, **arguments):
    """The lines that a function yields in a process of its own, whose processes are forks of it."""
    words = [function, json.dumps(asdict(SMALL)), json.dumps(arguments)]
    worker = WORKERS / "gpu_checking.py"
    ended = program(WORKERS / "launching.py", worker, *words, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return [Line(**line) for line in json.loads(ended.stdout)]


@pytest.fixture(scope="module")
def checked():
    """The checks of two processes, on the CPU with gloo, in one launch."""
    names = ("processes", "training speed", "training speed, bf16", "all-gather", "waits", "ZeRO")
    return {line.name: line for line in in_forks("run_checks", checks=names, processes=2)}


@pytest.mark.processes
@pytest.mark.timeout(600)  # the first launch compiles
def test_two_processes_are_checked(checked):
    assert checked["2 processes against one"].verdict == OK
    assert checked["2 processes against one"].figures["moved"] > 1e-3
    for stage in (1, 2, 3):
        assert checked[f"ZeRO-{stage}"].figures["errors"] == {"fp32": 0.0, "bf16": 0.0}
        assert checked[f"ZeRO-{stage}"].verdict == OK
    assert checked["waits per step"].verdict == SKIPPED
    for name in ("convnet fp32, 2 processes", "convnet bf16, 2 processes", "all-gather of 2 MB"):
        assert checked[name].verdict in (OK, SLOW)
        assert checked[name].figures["ratio"] > 0


@pytest.mark.processes
def test_a_check_that_ends_its_processes_is_a_line_and_the_next_ones_run():
    """One that nobody has written fails like one that crashes."""
    failed, recall = in_forks("run_checks", checks=["nonsense", "Recall@K"], processes=1)
    assert (failed.name, failed.verdict) == ("nonsense", FAILED)
    assert failed.text == "process 0: KeyError: 'nonsense'"
    assert "Traceback" in failed.figures["log"]
    assert (recall.name, recall.verdict) == ("Recall@K", OK)


@pytest.mark.processes
def test_a_check_that_takes_too_long_is_a_line():
    """Its process is a new interpreter, as it is for users."""
    (found,) = run_checks(["Recall@K"], 1, SMALL, most_seconds=0.1)
    assert (found.verdict, found.text) == (FAILED, "took longer than 0.1 seconds")


@pytest.mark.training
@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_resumes(tmp_path):
    sets = [f"data.shards={ICONS}", "data.workers=0", "data.size=16", "batch.classes=16"]
    sets += ["model.embedding_size=32", "eval.every_steps=null", "eval.untrained=false"]
    killed, again = in_forks("kill_lines", processes=2, folder=str(tmp_path), sets=sets)
    assert killed.verdict in (OK, SLOW), killed
    assert killed.text.startswith("rank 1 of 2 was killed; all ended ")
    assert again.verdict == OK, again


@pytest.mark.training
def test_a_training_that_never_starts_is_a_line(tmp_path):
    (found,) = kill_lines(2, SMALL, tmp_path, "batch.classes=nonsense")
    assert (found.verdict, found.text) == (FAILED, "rank 1 never reached a checkpoint")
    assert "batch.classes" in found.figures["log"]
    assert kill.find_rank(1, 1_000) is None


# ---- the fake GPU ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_fake_gpu_passes():
    """Losses and retrieval, on a device that refuses what a GPU refuses."""
    (done,) = run("fake_check.py", 1, json.dumps({"rows": 60, "dimensions": 8}))
    verdicts = dict(line.split(": ") for line in done.stdout.splitlines())
    assert verdicts == {
        "losses, streaming float64": OK,
        "losses, streaming float32": OK,
        "losses, triton float32": SKIPPED,
        "Recall@K": OK,
    }
