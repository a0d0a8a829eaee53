"""Oracle: the paper's Section 5 (hyper-parameters, splits) and the rules written out by hand."""

import math

import pytest

from dml.catalogue import (
    DATASETS,
    LOSS_PARAMETERS,
    MINING_SETTLED,
    Problem,
    at_least,
    complete_loss,
    fit,
)


def lines(name: object, **given: object) -> list[str]:
    return [str(problem) for problem in complete_loss(name, given)[1]]


def test_multi_similarity_has_the_parameters_of_the_authors_code() -> None:
    assert complete_loss("multi_similarity", {}) == (
        {"alpha": 2.0, "beta": 40.0, "lam": 0.5, "eps": 0.1},
        [],
    )


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_every_loss_is_complete_without_being_given_anything(name: str) -> None:
    parameters, problems = complete_loss(name, {})
    mining = {} if name in MINING_SETTLED else {"mine": False}
    assert parameters == {**LOSS_PARAMETERS[name], **mining}
    assert problems == []


@pytest.mark.parametrize("name", LOSS_PARAMETERS)
def test_completing_twice_changes_nothing(name: str) -> None:
    for given in ({}, {} if name in MINING_SETTLED else {"mine": True}):
        once, _ = complete_loss(name, given)
        assert complete_loss(name, once) == (once, [])


def test_mining_brings_its_eps() -> None:
    assert complete_loss("triplet", {"mine": True}) == (
        {"lam": 0.1, "mine": True, "eps": 0.1},
        [],
    )
    assert complete_loss("triplet", {"mine": True, "eps": 0.2})[0]["eps"] == 0.2


@pytest.mark.parametrize("given", [{"eps": 0.1}, {"eps": 0.1, "mine": False}])
def test_eps_without_mining_is_refused(given: dict[str, object]) -> None:
    assert lines("triplet", **given) == [
        "eps = 0.1: eps has no effect without mine: true; set mine: true or drop eps"
    ]


def test_eps_is_not_blamed_for_a_mine_that_cannot_be_read() -> None:
    assert lines("triplet", mine="yes", eps=0.2) == [
        "mine = 'yes': must be true or false; the default is False"
    ]


@pytest.mark.parametrize("name", sorted(MINING_SETTLED))
def test_mine_is_no_parameter_where_the_name_settles_it(name: str) -> None:
    assert "mine = True: unknown parameter" in lines(name, mine=True)[0]


def test_an_unknown_loss_lists_the_known_ones() -> None:
    (line,) = lines("multi_similarty")
    assert line.startswith(
        "name = 'multi_similarty': unknown loss; did you mean multi_similarity? the losses are "
    )
    assert all(name in line for name in LOSS_PARAMETERS)


@pytest.mark.parametrize("name", [None, 5, ["triplet"], {}])
def test_a_loss_name_of_another_type_is_an_unknown_loss(name: object) -> None:
    assert "unknown loss" in lines(name)[0]


def test_an_unknown_parameter_lists_those_of_the_loss() -> None:
    assert lines("multi_similarity", betta=40) == [
        (
            "betta = 40: unknown parameter; did you mean beta? "
            "multi_similarity takes alpha, beta, lam, eps"
        )
    ]


def test_all_problems_come_at_once() -> None:
    assert lines("binomial_deviance", alpha=0, beta="50", lam=math.inf, mine=1, bins=3) == [
        "alpha = 0: must be a finite number, above 0; the default is 2.0",
        "beta = '50': must be a finite number, above 0; the default is 40.0",
        "lam = inf: must be a finite number; the default is 0.5",
        "mine = 1: must be true or false; the default is False",
        "bins = 3: unknown parameter; binomial_deviance takes alpha, beta, lam, mine, eps",
    ]


@pytest.mark.parametrize("bins", [1, 151.0, True, "151", [151]])
def test_bins_is_a_whole_number_of_at_least_two(bins: object) -> None:
    assert lines("histogram", bins=bins) == [
        f"bins = {bins!r}: must be a whole number, at least 2, at most 1,000,000; the default is 151"
    ]


LIST = "must be a list of whole numbers, not empty, positive and strictly increasing, at most 1,000,000,000"


@pytest.mark.parametrize("ks", [[], [2, 1], [1.5], [True], "1", 1, [0, 1]])
def test_ks_are_a_list_of_increasing_whole_numbers(ks: object) -> None:
    assert lines("recall_surrogate", ks=ks) == [
        f"ks = {ks!r}: {LIST}; the default is (1, 2, 4, 8, 16)"
    ]


def test_taus_are_one_number_for_each_k() -> None:
    assert complete_loss("recall_surrogate", {"ks": [1, 3]})[0]["taus"] == (1.0, 3.0)
    assert complete_loss("recall_surrogate", {"ks": (1, 3), "taus": [1, 0.5]})[0]["taus"] == (
        1.0,
        0.5,
    )
    assert lines("recall_surrogate", taus=[1, 2]) == [
        "taus = [1, 2]: must be one for each of the 5 ks; drop taus for tau_k = k"
    ]
    for taus in ([1, 2, 3, 4, -1], [1, 2, 3, 4, math.inf], [1, 2, 3, 4, "5"], 1.0):
        (line,) = lines("recall_surrogate", taus=taus)
        assert "must be a list of finite numbers, each above 0" in line


@pytest.mark.parametrize("variant", ["both", "", 1])
def test_supcon_has_two_variants(variant: object) -> None:
    assert lines("supcon", variant=variant) == [
        f"variant = {variant!r}: must be text, one of out, in; the default is out"
    ]


@pytest.mark.parametrize("name", ["nca", "n_pairs", "lifted_structure", "supcon", "smooth_ap"])
def test_a_temperature_is_above_zero(name: str) -> None:
    assert "tau = 0: must be a finite number, above 0" in lines(name, tau=0)[0]


@pytest.mark.parametrize("name", ["nca", "n_pairs", "lifted_structure"])
def test_the_temperature_of_the_papers_losses_is_one(name: str) -> None:
    assert complete_loss(name, {})[0]["tau"] == 1.0


@pytest.mark.parametrize("eps", [-0.1, math.nan, True, None])
def test_eps_is_not_negative(eps: object) -> None:
    assert "must be a finite number, at least 0" in lines("ms_mining", eps=eps)[0]


def test_boundaries_are_allowed() -> None:
    assert lines("ms_mining", eps=0) == []
    assert lines("histogram", bins=2) == []
    assert lines("contrastive", lam=-1) == []


def test_a_whole_number_becomes_a_float() -> None:
    beta = complete_loss("multi_similarity", {"beta": 45})[0]["beta"]
    assert beta == 45.0
    assert type(beta) is float


def test_fit_refuses_a_whole_number_no_float_can_hold() -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        fit(10**400, float)


def test_fit_returns_lists_as_tuples_of_whole_numbers_only() -> None:
    assert fit([1, 2], tuple[int, ...]) == (1, 2)
    for wrong in ([1, True], [1.0], 1, "12"):
        with pytest.raises(ValueError, match="a list of whole numbers"):
            fit(wrong, tuple[int, ...])


def test_fit_takes_lists_of_numbers_and_of_texts() -> None:
    numbers = fit([1, 2.5], tuple[float, ...])
    assert numbers == (1.0, 2.5)
    assert {type(each) for each in numbers} == {float}
    assert fit(["a", "b"], tuple[str, ...]) == ("a", "b")
    with pytest.raises(ValueError, match="a list of finite numbers"):
        fit([1.0, math.nan], tuple[float, ...])
    with pytest.raises(ValueError, match="a list of texts"):
        fit(["a", 1], tuple[str, ...])


def test_fit_checks_the_type_before_the_rule() -> None:
    with pytest.raises(ValueError, match="must be a whole number, at least 2"):
        fit("ten", int, at_least(2))


def test_a_problem_is_one_short_line() -> None:
    line = str(Problem("run.name", "a\n" * 500, "must be text", "shorten it", "x.yaml"))
    assert "\n" not in line
    assert len(line) < 120
    assert line.endswith("... (x.yaml): must be text; shorten it")


def test_splits_are_those_of_section_5() -> None:
    sizes = {name: (d.train_classes, d.train_images) for name, d in DATASETS.items()}
    assert sizes == {
        "sop": (11318, 59551),
        "cub200": (100, 5864),
        "cars196": (98, 8054),
        "inshop": (3997, 25882),
        "icons": (None, None),
        "folder": (None, None),
    }


def test_ks_are_the_columns_of_the_tables() -> None:
    assert DATASETS["sop"].ks == (1, 10, 100, 1000)
    assert DATASETS["cub200"].ks == DATASETS["cars196"].ks == (1, 2, 4, 8, 16, 32)
    assert DATASETS["inshop"].ks == (1, 10, 20, 30, 40, 50)
