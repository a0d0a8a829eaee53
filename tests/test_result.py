"""What is said after a run, by hand."""

from pathlib import Path

import pytest

from dml.config import load
from dml.run_folder.result import summary

CONFIGS = Path(__file__).parents[1] / "configs"
PAPER, AUTHORS = CONFIGS / "presets/paper.yaml", CONFIGS / "presets/authors.yaml"
LESS = "try a tenth of optim.lr, or fewer steps"


@pytest.mark.parametrize(
    ("files", "sets", "advice"),
    [
        (["your_images.yaml"], [], LESS),
        (
            ["your_images.yaml", PAPER],
            [],
            f"add configs/presets/authors.yaml to --config, or {LESS}",
        ),
        (["icons_mini.yaml"], [], LESS),
        (
            ["icons_mini.yaml", AUTHORS],
            [],
            f"add configs/presets/paper.yaml to --config, or {LESS}",
        ),
        (["sop.yaml"], ["loss.name=triplet"], LESS),
    ],
)
def test_a_run_that_ended_below_its_start_says_what_to_try(files, sets, advice):
    config = load([CONFIGS / file for file in files], sets)
    result = {"recall@1": 0.2, "untrained": {"recall@1": 0.25}}
    scores, warning, _ = summary(Path("runs/x"), result, config).splitlines()
    assert scores == "Recall@1 of the test classes: 25.0% untrained, 20.0% trained"
    assert warning == f"warning: training made it worse; {advice}"


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"recall@1": 0.3}, ""),
        ({"recall@1": 0.25}, ", which training does not beat: it has failed"),
        ({"validation_recall@1": 0.2}, ", which training does not beat: it has failed"),
    ],
)
def test_a_run_is_compared_with_the_features_that_it_began_with(scores, said):
    config = load(CONFIGS / "icons_mini.yaml")
    result = {
        "untrained": None,
        "frozen": {"recall@1": 0.25},
        "validation_recall@1": None,
        **scores,
    }
    line, _ = summary(Path("runs/x"), result, config).splitlines()
    assert line == f"Recall@1 of the features without a head: 25.0%{said}"


@pytest.mark.parametrize("after", [0.25, 0.3])
def test_a_run_that_did_not_get_worse_has_no_warning(after):
    config = load(CONFIGS / "icons_mini.yaml")
    said = summary(Path("runs/x"), {"recall@1": after, "untrained": {"recall@1": 0.25}}, config)
    assert "warning" not in said
