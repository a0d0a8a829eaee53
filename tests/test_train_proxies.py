"""Training with proxies. Oracles: the run of one process, the run that nothing interrupts, plain DDP."""

import json
import shutil
import signal

import pytest
import torch
from runs import Launched, checkpoints, content, lines, losses, scalars, train_several
from safetensors.torch import load_file

from dml.catalogue import PROXY_LOSSES
from dml.config import CONFIGS, load
from dml.plan import built_sizes, plan

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

ANCHOR = ["loss.name=proxy_anchor", "optim.schedule=constant", "length.steps=6"]
EXACT = "engine.precision=fp64"
RUNS = {
    **{name: [*ANCHOR, f"loss.name={name}", EXACT] for name in PROXY_LOSSES},
    "micro": [*ANCHOR, "engine.micro_batch=4", EXACT],
    "sgd": [*ANCHOR, "loss.name=arcface", "optim.name=sgd", EXACT],
    "adamw": [*ANCHOR, "loss.name=arcface", "optim.name=adamw", EXACT],
    "held out": [*ANCHOR, "eval.validation_classes=0.2", "eval.every_steps=6", EXACT],
    "sigmoid": [*ANCHOR, "loss.name=pairwise_sigmoid", "loss.learn=true", EXACT],
    "plain": ANCHOR,
    "bf16": [*ANCHOR, "engine.precision=bf16"],
}
SHORT = {"short": [*ANCHOR, EXACT, "length.steps=3"], "short plain": [*ANCHOR, "length.steps=3"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Number of processes -> the folder with RUNS; those of 2 processes also with SHORT."""
    found = {}
    for processes in (1, 2, 3):
        folder = found[processes] = tmp_path_factory.mktemp(f"world{processes}")
        some = ("proxy_anchor", "arcface")  # of three processes
        runs = RUNS if processes < 3 else {name: RUNS[name] for name in some}
        for name, ended in train_several(processes, folder, runs).items():
            assert [code for code, _ in ended] == [0] * processes, (name, ended)
    return found


def learned(run, step=-1):
    return load_file(checkpoints(run)[step] / "loss.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_for_any_number_of_processes(folders, name):
    tolerance = 1e-10 if EXACT in RUNS[name] else 2e-2 if name == "bf16" else 2e-4
    alone, of_alone = losses(folders[1] / name), learned(folders[1] / name)
    assert len({*alone}) == len(alone) == 6, "nothing was learned"
    for processes in [w for w in folders if (folders[w] / name).exists()]:
        run = folders[processes] / name
        assert losses(run) == pytest.approx(alone, rel=tolerance)
        found = learned(run)
        if name == "sigmoid":
            assert [key for key in found if "/" not in key] == ["learned.b", "learned.log_t"]
            assert found["learned.b"].item() != -10
        else:
            assert len(found) == (2 if name == "sgd" else 3)
            assert found["proxies"].shape == (400 if name == "held out" else 500, 32)
        if EXACT in RUNS[name]:
            for key, x in found.items():
                torch.testing.assert_close(x, of_alone[key], rtol=1e-7, atol=1e-10)


def test_micro_batches_change_nothing(folders):
    for processes in (1, 2):
        expected = losses(folders[processes] / "proxy_anchor")
        assert losses(folders[processes] / "micro") == pytest.approx(expected, rel=1e-10)


def test_every_proxy_learns_and_the_norm_of_its_gradient_is_logged(folders):
    for line in [each for each in lines(folders[1] / "proxy_anchor") if "loss" in each]:
        assert line["loss_gradient_norm"] > 0
        assert "anchors_mined" not in line
    assert "train/loss_gradient_norm" in scalars(folders[1] / "proxy_anchor")
    m = learned(folders[1] / "proxy_anchor")["proxies/exp_avg"]
    assert (m.abs().sum(1) > 0).all(), "every proxy has negatives"


@pytest.fixture(scope="module")
def shorter(tmp_path_factory):
    """The first half of some runs of two processes."""
    folder = tmp_path_factory.mktemp("shorter")
    for name, ended in train_several(2, folder, SHORT).items():
        assert [code for code, _ in ended] == [0, 0], (name, ended)
    return folder


def longer(run, processes, folder, sets, tmp_path):
    """Train a copy of a finished run on."""
    shutil.copytree(folder / run, tmp_path / run)
    ended = train_several(processes, tmp_path, {run: sets})
    assert [code for code, _ in ended[run]] == [0] * processes, ended
    return tmp_path / run


def test_resumed_with_as_many_processes_a_run_gives_the_same_bits(folders, shorter, tmp_path):
    run = longer("short plain", 2, shorter, ANCHOR, tmp_path)
    whole = folders[2] / "plain"
    assert content(run)[0] == content(whole)[0]
    assert losses(run) == losses(whole)
    for key, x in learned(whole).items():
        assert torch.equal(learned(run)[key], x), key


@pytest.mark.parametrize("processes", [1, 3])
def test_resumed_with_another_number_of_processes_it_is_the_same_to_rounding(
    folders, shorter, processes, tmp_path
):
    run = longer("short", processes, shorter, [*ANCHOR, EXACT], tmp_path)
    whole = folders[1] / "proxy_anchor"
    assert losses(run) == pytest.approx(losses(whole), rel=1e-10)
    for key, x in learned(whole).items():
        torch.testing.assert_close(learned(run)[key], x, rtol=1e-7, atol=1e-10)


def test_killed_and_resumed_a_run_gives_the_same_bits(folders, tmp_path):
    sets = [*ANCHOR, "save.every_minutes=1e-6"]
    run = Launched(2, tmp_path, *sets)
    run.until(3).rank(1).send_signal(signal.SIGKILL)
    assert 0 not in run.end()
    again = Launched(2, tmp_path, *sets)
    assert again.end() == [0, 0], again.said
    assert "resuming after step" in again.said
    assert content(again.run)[0] == content(folders[2] / "plain")[0]
    assert losses(again.run) == losses(folders[2] / "plain")


@pytest.mark.parametrize("starts", [{"zero1": 6}, {"zero2": 6}, {"zero0": 3, "zero3": 6}], ids=str)
def test_zero_leaves_the_proxies_alone(folders, starts, tmp_path):
    """In two processes, against plain DDP; the last one is resumed after three steps, at another stage."""
    settings = json.loads((CONFIGS / "accelerate" / "zero1.json").read_text())
    settings["zero_optimization"]["stage"] = 0  # which no file of ours has
    (tmp_path / "zero0.json").write_text(json.dumps(settings))
    for stage, steps in starts.items():
        how = str(tmp_path / stage) if stage == "zero0" else stage
        run = Launched(how, tmp_path, *ANCHOR, f"length.steps={steps}")
        assert run.end() == [0, 0], run.said
    whole = folders[2] / "plain"
    assert losses(run.run) == pytest.approx(losses(whole), rel=1e-5)
    for key, x in learned(whole).items():
        torch.testing.assert_close(learned(run.run)[key], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["proxy_anchor", "arcface"])
def test_the_plan_says_what_is_sent(folders, name):
    """Training knows all labels, so that they are not sent, and here embeddings are float64."""
    folder, processes = folders[3] / name, 3
    config = load(folder / "config.yaml")
    planned = plan(config, processes, *built_sizes(config))
    b, d = planned.images_per_process, config.model.embedding_size
    known = b * 8
    wider = 2 * b * d * 4  # embeddings there, gradients back
    expected = planned.loss_bytes_sent + (processes - 1) * (wider - known)
    last = json.loads((folder / "timing.jsonl").read_text().splitlines()[-1])
    assert last["bytes_sent"] == expected  # per step
