"""The same run for any number of processes. Oracle: the loss curve of one process."""

import pytest
from pictures import make_folder
from runs import ONE_CORE, losses, train_several

from shards.build import main as build

pytestmark = pytest.mark.training

CONVNET = ["length.steps=10"]
# Pretrained, with frozen BatchNorm. On few images: in float64 a depthwise convolution is a loop over the
# channels and the images, and it is slow to evaluate on all icons.
FROZEN = [
    "length.steps=5",
    "data.dataset=folder",
    "optim.lr=1e-5",
    "model.backbone=efficientnet_lite0",
    "model.weights=pretrained",
    "data.size=32",
    "batch.classes=4",
]
TOLERANCE = {"fp32": 1e-4, "fp64": 1e-10}
CASES = {
    "convnet-1": (CONVNET, 1),
    "convnet-1-10": ([*CONVNET, "engine.micro_batch=10"], 1),
    "convnet-2": (CONVNET, 2),
    "convnet-4-5": ([*CONVNET, "engine.micro_batch=5"], 4),
    "frozen-1": (FROZEN, 1),
    "frozen-2": (FROZEN, 2),
    "frozen-2-again": ([*FROZEN, "model.checkpointing=true", "engine.deterministic=true"], 2),
    "frozen-4-2": ([*FROZEN, "engine.micro_batch=2"], 4),
}


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """(case, precision) -> losses. All cases of as many processes share one launch."""
    folder, known = tmp_path_factory.mktemp("curves"), {}
    images, shards = folder / "images", folder / "shards"
    make_folder(images, classes=8)
    assert build(["folder", "--root", str(images), "--out", str(shards), "--workers", "1"]) == 0
    few = [f"data.shards={shards}"]

    def launch(processes):
        runs = {
            f"{case}-{precision}": [
                *sets,
                *(few if case.startswith("frozen") else []),
                f"engine.precision={precision}",
            ]
            for case, (sets, of) in CASES.items()
            for precision in TOLERANCE
            if of == processes
        }
        ended_runs = train_several(processes, folder, runs, variables=ONE_CORE)
        for name, ended in ended_runs.items():
            assert [code for code, _ in ended] == [0] * processes, ended
            known[name] = losses(folder / name)

    def read(case, precision):
        if f"{case}-{precision}" not in known:
            launch(CASES[case][1])
        return known[f"{case}-{precision}"]

    return read


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("-1")])
def test_the_loss_curve_does_not_depend_on_the_processes(curve, case, precision):
    model = case.split("-")[0]
    expected, found = curve(f"{model}-1", precision), curve(case, precision)
    assert len(found) == len(expected) == (10 if model == "convnet" else 5)
    assert found == pytest.approx(expected, rel=TOLERANCE[precision])
    assert len({*expected}) == len(expected), "nothing was learned"


def test_checkpointing_and_deterministic_algorithms_change_nothing_on_a_cpu(curve):
    assert curve("frozen-2-again", "fp32") == curve("frozen-2", "fp32")
