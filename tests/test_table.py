"""Table 1 of the paper, from a computation over LOSSES."""

import subprocess
import sys
from pathlib import Path

import pytest

from dml.catalogue import LOSS_PARAMETERS
from dml.gpw import LOSSES
from dml.gpw.table import dependence, rows

# Table 1, and the second column of the ablation (Table 2)
PAPER = {
    "contrastive": "S",
    "binomial_deviance": "S",
    "triplet": "P",
    "histogram": "P",
    "n_pairs": "N",
    "lifted_structure": "N",
    "lifted_structure_star": "N",
    "bin_lifted": "SN",
    "nca": "PN",
    "multi_similarity": "SPN",
    "ms_weighting": "SN",
    "ms_mining": "P",
}
# Losses of other papers, from their equations
OTHERS = {
    "recall_surrogate": "PN",  # a sum over the positives, of slopes that follow from ranks
    "smooth_ap": "PN",
    "supcon": "PN",  # a softmax over all pairs of the anchor
    "info_nce": "PN",
    "circle": "SPN",  # the same, of a square of S
    "margin": "SPN",  # of D and its share among the negatives; P by the number of active pairs
    "pairwise_sigmoid": "S",
}


def test_every_loss_is_in_one_of_the_tables():
    assert set(PAPER) | set(OTHERS) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_dependence_is_that_of_the_paper(name):
    assert dependence(rows()[name]) == {**PAPER, **OTHERS}[name]


def test_mining_adds_similarity_p():
    assert dependence(rows()["lifted_structure_star, mined"]) == "PN"
    # The paper says SP. Counting the selected pairs in 1/N_i makes the weight depend on the other
    # negatives too (docs/decisions/0003).
    assert dependence(rows()["binomial_deviance, mined"]) == "SPN"


def test_the_page_of_losses_has_a_row_for_each_with_its_parameters():
    page = (Path(__file__).parents[1] / "docs" / "losses.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    found = {row[0].strip("`"): row[-3] for row in rows}
    assert found == {name: ", ".join(LOSS_PARAMETERS[name]) for name in LOSS_PARAMETERS}


def test_the_command_prints_the_table():
    out = subprocess.run(
        [sys.executable, "-m", "dml.gpw.table"], capture_output=True, text=True, check=True
    ).stdout
    rows = dict(line.rsplit(maxsplit=3)[0::3] for line in out.splitlines()[1:])
    assert len(out.splitlines()) == 1 + len(LOSSES) + 2
    assert "multi_similarity                   x  x  x" in out
    assert "contrastive                        x  -  -" in out
    assert set(LOSSES) <= set(rows)
