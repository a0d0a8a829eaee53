"""A finished run is trained longer by a larger length. Oracle: a run that was that long from the start."""

import shutil
import signal

import pytest
from runs import BASE, Launched, content, lines, result, train_several

from dml.inference.trained import load_trained
from dml.train import main

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("fresh_accelerate")]

# The last step of the short runs is no multiple of 7: it is evaluated because it is the last.
HELD_OUT = ["optim.schedule=constant", "eval.every_steps=7", "eval.validation_classes=0.1"]
# Here it is one, and the schedule has a milestone after it.
STEPPED = ["optim.schedule=step", "optim.milestones=[8, 16]", "eval.every_steps=6"]
SHORT, LONG = "length.steps=12", "length.steps=20"
COSINE = ["optim.schedule=cosine", SHORT]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of short runs and of long ones."""
    folder = tmp_path_factory.mktemp("ended")
    wanted = {
        "held_out": [*HELD_OUT, SHORT],
        "held_out_long": [*HELD_OUT, LONG],
        "stepped": [*STEPPED, SHORT],
        "stepped_long": [*STEPPED, LONG],
        "cosine": COSINE,
    }
    for how in train_several(1, folder, wanted).values():
        assert [code for code, _ in how] == [0], how
    return folder


@pytest.fixture
def copy(ended, tmp_path):
    """A run of the fixture, in a folder of its own."""

    def of(name):
        return shutil.copytree(ended / name, tmp_path / name)

    return of


def train(run, *sets):
    return main([*BASE, f"run.dir={run.parent}", f"run.name={run.name}", *sets])


@pytest.mark.parametrize(("name", "sets"), [("held_out", HELD_OUT), ("stepped", STEPPED)])
def test_it_equals_a_run_that_was_so_long_from_the_start(name, sets, ended, copy, capsys):
    run = copy(name)
    # the same length in other words: a batch has 48 images
    assert train(run, *sets, "length.steps=null", f"length.images={20 * 48}") == 0
    assert "resuming after step 12" in capsys.readouterr().out
    assert content(run) == content(ended / f"{name}_long")
    before, after = (result(each) for each in (ended / f"{name}_long", run))
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
    assert train(run, *sets, LONG) == 0
    assert "is finished already" in capsys.readouterr().out


def test_until_it_has_ended_the_earlier_result_stands(ended, copy):
    run = copy("stepped")
    sets = [*STEPPED, LONG, f"run.name={run.name}"]
    launched = Launched(1, run.parent, *sets)
    launched.run = run
    launched.until(15).rank(0).send_signal(signal.SIGTERM)
    assert launched.end() == [75], launched.said
    assert result(run) == result(ended / "stepped")
    load_trained(run)  # its model still has the checksum of the result
    again = Launched(1, run.parent, *sets)
    assert again.end() == [0], again.said
    assert content(run) == content(ended / "stepped_long")


@pytest.mark.parametrize(
    ("name", "sets", "said"),
    [
        (
            "cosine",
            [*COSINE, LONG],
            (
                "length.steps was 12 and is 20 (with optim.schedule=cosine the learning rate of every "
                "step depends on the length, so a run cannot be trained longer); set run.name to"
            ),
        ),
        (
            "stepped",
            [*STEPPED, "length.steps=9"],
            "has already been trained for 12 steps, and length asks for 9; set length to as many or more",
        ),
        ("stepped", [*STEPPED, LONG, "optim.lr=1e-3"], "optim.lr was 0.0001 and is 0.001; set run"),
    ],
    ids=["cosine", "shorter", "other settings"],
)
def test_what_is_refused(name, sets, said, copy, capsys):
    """In a sentence, and nothing changes."""
    run = copy(name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert train(run, *sets) == 2
    assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_result_without_its_checkpoints_is_not_trained_anew(copy, capsys):
    run = copy("stepped")
    shutil.rmtree(run / "checkpoints")
    assert train(run, *STEPPED, LONG) == 2
    assert "a result and no checkpoint to train it longer from" in capsys.readouterr().err
    assert len(lines(run)) == len(lines(run.parent / "stepped"))
