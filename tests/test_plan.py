"""Oracle: arithmetic written out by hand in the tests, and error texts literally."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dml.config import Config, load
from dml.cost import loss_flops, rows_at_a_time
from dml.errors import ConfigError
from dml.plan import Plan, main, plan

ROOT = Path(__file__).parent.parent
SOP_1000 = str(ROOT / "configs/sop_bs1000.yaml")


def sop_1000(*sets: str) -> Config:
    return load([SOP_1000], sets)


def problems(config: Config, processes: int = 1, **sizes: int) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan(config, processes, **sizes)
    return [str(problem) for problem in error.value.problems]


def test_sop_with_a_batch_of_1000_on_8_processes() -> None:
    assert plan(sop_1000("engine.micro_batch=32"), processes=8) == Plan(
        batch_size=1000,
        processes=8,
        images_per_process=125,
        micro_batches=4,  # 32 + 32 + 32 + 29
        train_classes=11318,
        validation_classes=0,
        steps=3200,
        images=3_200_000,
        epochs=3_200_000 / 59_551,
        steps_per_epoch=60,
        # 7 blocks of 125 rows: 512 floats, a label of 8 bytes, 4 statistics of 4 bytes; and 8
        # bytes for its share of the loss
        loss_bytes_sent=7 * (125 * (2048 + 8 + 16) + 8),
        # embeddings twice, labels, statistics; gradient twice; S, 5 tiles of 125 x 1000
        loss_memory=2 * 1000 * 2048
        + 1000 * 8
        + 1000 * 16
        + 2 * 125 * 2048
        + 4 * 125 * 1000
        + 5 * 4 * 125 * 1000,
        # two products of 125 x 1000 x 512, a multiplication and an addition each: S is kept
        loss_flops=2 * 2 * 125 * 1000 * 512,
    )


def test_the_products_of_the_loss() -> None:
    """In those of X X^T and G X. S is kept up to 64 MiB; one process computes half of it."""
    bare = 2 * 2 * 64
    assert loss_flops(4_096, 64, 1) == 0.75 * bare * 4_096**2
    assert loss_flops(8_192, 64, 8) == bare * 8_192**2 / 8
    assert loss_flops(65_536, 64, 64) == 1.5 * bare * 65_536**2 / 64
    assert loss_flops(65_536, 64, 1) == pytest.approx(bare * 65_536**2, rel=0.01)


def test_one_process_sends_nothing() -> None:
    assert plan(sop_1000()).loss_bytes_sent == 0


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("steps=7", 7),
        ("images=1000", 1),
        ("images=1001", 2),
        ("images=1", 1),
        ("epochs=1", 60),  # 59,551 images in batches of 1,000
        ("epochs=1.1", 66),  # 65,506.1, and not a hair more
        ("epochs=2", 120),  # 119,102
        ("epochs=0.5", 30),
    ],
)
def test_steps_cover_the_length(length: str, steps: int) -> None:
    p = plan(sop_1000(f"length.{length}"))
    assert (p.steps, p.images) == (steps, steps * 1000)


def test_streaming_memory_is_linear_in_the_batch() -> None:
    small, large = (
        plan(sop_1000(f"batch.classes={n}", "batch.per_class=100")).loss_memory
        for n in (1000, 2000)
    )
    assert large < 2.01 * small


def test_the_argument_overrides_the_catalogue() -> None:
    p = plan(sop_1000("length.epochs=1"), train_classes=300, train_images=5000)
    assert (p.train_classes, p.steps, p.steps_per_epoch, p.epochs) == (300, 5, 5, 1.0)


def test_held_out_classes_leave_the_training_set() -> None:
    p = plan(
        sop_1000("eval.validation_classes=0.1", "eval.every_steps=5", "length.epochs=1"),
        train_classes=1000,
        train_images=10_000,
    )
    assert (p.train_classes, p.validation_classes, p.steps) == (900, 100, 9)


def test_an_unknown_size_leaves_epochs_unknown() -> None:
    config = sop_1000("data.dataset=folder")
    p = plan(config)
    assert (p.epochs, p.steps_per_epoch, p.train_classes) == (None, None, None)
    assert "epochs                     unknown until the shards are read" in str(p)
    assert plan(config, train_classes=300, train_images=3000).steps_per_epoch == 3


# ---- what is impossible --------------------------------------------------------------------


def test_a_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    assert problems(sop_1000("batch.classes=201"), 8) == [
        (
            "batch.classes = 201: 1005 images are not divisible by 8 processes;"
            " set batch.classes=200 or batch.classes=208"
        )
    ]


@pytest.mark.parametrize("classes", [2, 3, 4, 7, 13, 201])
@pytest.mark.parametrize("per_class", [2, 5, 6])
@pytest.mark.parametrize("processes", [3, 4, 8, 10])
def test_the_suggested_class_counts_are_the_nearest_that_divide(
    classes: int, per_class: int, processes: int
) -> None:
    config = sop_1000(f"batch.classes={classes}", f"batch.per_class={per_class}")
    if classes * per_class % processes == 0:
        plan(config, processes)
        return
    fix = problems(config, processes)[0].split("; set ")[1]
    below = [n for n in range(2, classes) if n * per_class % processes == 0]
    above = next(n for n in range(classes, 1000) if n * per_class % processes == 0)
    assert fix == " or ".join(f"batch.classes={n}" for n in [*below[-1:], above])


def test_more_classes_than_there_are() -> None:
    assert problems(sop_1000("data.dataset=cub200")) == [
        "batch.classes = 200: only 100 classes to train on; set batch.classes to at most 100"
    ]
    assert problems(sop_1000(), train_classes=199) == [
        "batch.classes = 200: only 199 classes to train on; set batch.classes to at most 199"
    ]
    plan(sop_1000(), train_classes=200)


def test_held_out_classes_cannot_be_batched() -> None:
    config = sop_1000("eval.validation_classes=0.5", "eval.every_steps=5")
    assert problems(config, train_classes=300) == [
        "batch.classes = 200: only 150 classes to train on; set batch.classes to at most 150"
    ]


def test_a_share_too_small_to_hold_out_anything() -> None:
    config = sop_1000("eval.validation_classes=0.001", "eval.every_steps=5")
    assert problems(config, train_classes=300) == [
        (
            "eval.validation_classes = 0.001: holds out 0 of 300 classes;"
            " both parts need at least 2; choose another share"
        )
    ]


def test_a_micro_batch_larger_than_what_a_process_has() -> None:
    assert problems(sop_1000("engine.micro_batch=126"), 8) == [
        (
            "engine.micro_batch = 126: must not be larger than the 125 images per process;"
            " set engine.micro_batch to at most 125, or null for no gradient caching"
        )
    ]
    assert plan(sop_1000("engine.micro_batch=125"), 8).micro_batches == 1


@pytest.mark.parametrize("batchnorm", ["synced", "local"])
def test_gradient_caching_needs_frozen_batchnorm(batchnorm: str) -> None:
    sets = (f"model.batchnorm={batchnorm}", "engine.micro_batch=500")
    assert problems(sop_1000(*sets)) == [
        (
            f"model.batchnorm = '{batchnorm}': with more than one micro-batch, BatchNorm would use the"
            " statistics of each micro-batch, not those of the whole batch; set"
            " model.batchnorm=frozen"
        )
    ]
    plan(sop_1000(f"model.batchnorm={batchnorm}", "engine.micro_batch=1000"))


def test_local_batchnorm_needs_one_process() -> None:
    assert problems(sop_1000("model.batchnorm=local"), 2) == [
        (
            "model.batchnorm = 'local': with several processes, each would normalise with the"
            " statistics of its own images;"
            " set model.batchnorm=frozen or model.batchnorm=synced"
        )
    ]
    plan(sop_1000("model.batchnorm=local"), 1)
    plan(sop_1000("model.batchnorm=synced"), 2)


def test_epochs_of_a_dataset_of_unknown_size() -> None:
    config = sop_1000("data.dataset=icons", "length.epochs=3")
    assert problems(config) == [
        (
            "length.epochs = 3.0: the size of icons is unknown until the shards are read;"
            " set length.steps or length.images"
        )
    ]
    assert plan(config, train_images=2000).steps == 6


@pytest.mark.parametrize("processes", [0, -1])
def test_processes_must_be_positive(processes: int) -> None:
    assert problems(sop_1000(), processes) == [
        f"processes = {processes}: must be at least 1; for example --processes 8"
    ]


def test_auto_plans_one_process_per_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr("dml.plan.count_gpus", lambda: 8)
    assert main(["--config", SOP_1000, "--processes", "auto"]) == 0
    assert re.search(r"^processes +8$", capsys.readouterr().out, re.MULTILINE)


def test_all_problems_are_reported_together() -> None:
    config = sop_1000("batch.classes=20001", "model.batchnorm=local", "engine.micro_batch=7")
    with pytest.raises(ConfigError) as error:
        plan(config, 8)
    assert str(error.value).startswith("4 problems in the plan of sop_bs1000 for 8 processes:\n")


# ---- printing ------------------------------------------------------------------------------


def test_rows_at_a_time() -> None:
    """A tile, unless S of so many rows is above 256 MiB; 64 at least, or as many as there are."""
    assert rows_at_a_time(2_048, 16_384, 1_024) == 1_024
    assert rows_at_a_time(2_048, 131_072, 1_024) == 512
    assert rows_at_a_time(2_048, 131_072, 1_024, size=8) == 256
    assert rows_at_a_time(16_384, 2**24, 1_024) == 64
    assert rows_at_a_time(15, 2**24, 1_024) == 15
    assert rows_at_a_time(125, 1_000, 7) == 7


def test_table() -> None:
    assert str(plan(sop_1000(), 8)).splitlines() == [
        "batch size                 1,000 images",
        "processes                  8",
        "images per process         125",
        "micro-batches per process  1",
        "training classes           11,318",
        "validation classes         0",
        "steps                      3,200",
        "images                     3,200,000",
        "epochs                     53.74",
        "steps per epoch            60",
        (
            "sent for the loss          1.7 MiB per process and step"
            " (the reduction of the model's gradient is not included)"
        ),
        "memory of the loss         7.3 MiB per process",
        "work of the loss           0.256 GFLOP per process and step",
    ]


def test_to_dict_is_json() -> None:
    p = plan(sop_1000(), 8)
    assert Plan(**json.loads(json.dumps(p.to_dict()))) == p


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dml.plan", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_the_plan() -> None:
    done = run("--config", "configs/sop_bs1000.yaml", "--processes", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(plan(sop_1000(), 8))


def test_a_bad_config_exits_with_2_and_no_traceback() -> None:
    done = run("--config", "configs/sop_bs1000.yaml", "--set", "batch.clases=3", "loss.beta=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines() == [
        "2 problems in configs/sop_bs1000.yaml:",
        (
            "  batch.clases = 3 (--set): unknown key; did you mean batch.classes?"
            " batch has classes, per_class, group, mixed"
        ),
        "  loss.beta = -1 (--set): must be a finite number, above 0; the default is 40.0",
    ]


def test_set_takes_several_and_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", SOP_1000, "--set", "length.steps=5", "batch.classes=4"]
    assert main([*argv, "--set", "batch.per_class=3"]) == 0
    assert "images                     60" in capsys.readouterr().out.splitlines()


def test_an_impossible_plan_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", SOP_1000, "--processes", "7"]) == 2
    assert capsys.readouterr().err.startswith(
        "1 problem in the plan of sop_bs1000 for 7 processes:\n  batch.classes = 200: "
    )


def test_help_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "--set loss.beta=40" in " ".join(text.split())
    assert "--processes N" in text


def test_epochs_are_taken_as_written() -> None:
    """1.1 in binary is more than 1.1: 1.1 x 12,000 images in batches of 20 are 660 steps, not 661."""
    config = sop_1000("batch.classes=4", "length.epochs=1.1")
    assert plan(config, train_images=12_000).steps == 660
