"""The names that a config may use: losses with their hyper-parameters, datasets, backbones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dml.rules import (
    ANY,
    KS,
    NUMBERS,
    POSITIVE,
    WHOLE_NUMBERS,
    Problem,
    Rule,
    at_least,
    between,
    did_you_mean,
    fit,
    one_of,
    unknown_keys,
)

Parameter = float | int | bool | str | tuple[float, ...]

# alpha, beta, lam and eps are those of the authors' public code, which has multi_similarity only; the
# losses that share its parameters have the same values, so that they can be compared. From pretrained
# weights these train, and those of the paper's text (beta 50, lam 1) stall (docs/log.md). Neither gives
# a lam for contrastive, triplet, lifted_structure and n_pairs or a number of bins; those are our choices.
# The losses of other papers, from recall_surrogate on, have the values that their papers or published code
# recommend for retrieval; info_nce, which has no one value, has that of supcon. proxy_nca has those of
# ProxyNCA++; the first ProxyNCA is tau 1 without own_proxy.
LOSS_PARAMETERS: Mapping[str, Mapping[str, Parameter]] = {
    "multi_similarity": {"alpha": 2.0, "beta": 40.0, "lam": 0.5, "eps": 0.1},
    "ms_weighting": {"alpha": 2.0, "beta": 40.0, "lam": 0.5},
    "ms_mining": {"eps": 0.1},
    "contrastive": {"lam": 0.5},
    "triplet": {"lam": 0.1},
    "lifted_structure": {"lam": 1.0, "tau": 1.0},
    "lifted_structure_star": {"alpha": 2.0, "beta": 40.0},
    "binomial_deviance": {"alpha": 2.0, "beta": 40.0, "lam": 0.5},
    "n_pairs": {"lam": 1.0, "tau": 1.0},
    "nca": {"tau": 1.0},
    "histogram": {"bins": 151},
    "bin_lifted": {"alpha": 2.0, "beta": 40.0, "lam": 0.5},
    "recall_surrogate": {
        "tau": 0.01,
        "ks": (1, 2, 4, 8, 16),
        "taus": (1.0, 2.0, 4.0, 8.0, 16.0),
    },
    "smooth_ap": {"tau": 0.01},
    "supcon": {"tau": 0.1, "variant": "out"},
    "info_nce": {"tau": 0.1},
    "circle": {"m": 0.4, "gamma": 80.0},
    "margin": {
        "alpha": 0.2,
        "beta": 1.2,
        "dim": 512,
        "cutoff": 0.5,
        "nonzero_loss_cutoff": 1.4,
        "learn": False,
    },
    "pairwise_sigmoid": {"t": 10.0, "b": -10.0, "learn": False},
    "proxy_nca": {"tau": 1 / 9, "own_proxy": True},
    "proxy_anchor": {"alpha": 32.0, "delta": 0.1},
    "normalised_softmax": {"tau": 0.05},
    "arcface": {"s": 64.0, "margin": 0.5},
}
# The losses that compare samples with proxies, and which of the two are the anchors
PROXY_LOSSES: Mapping[str, str] = {
    "proxy_nca": "samples",
    "proxy_anchor": "proxies",
    "normalised_softmax": "samples",
    "arcface": "samples",
}

# The two sets of values that are published for multi_similarity; configs/presets has a file of each.
PRESETS: Mapping[str, Mapping[str, float]] = {
    "the authors' code": {"beta": 40.0, "lam": 0.5},
    "the paper's text": {"beta": 50.0, "lam": 1.0},
}

# MS mining can go in front of any weighting of pairs of samples, unless the name of the loss already says
# whether it does.
MINING: Mapping[str, Parameter] = {"mine": False, "eps": 0.1}
MINING_SETTLED = frozenset({"multi_similarity", "ms_weighting", "ms_mining", *PROXY_LOSSES})

PARAMETER_RULES = {
    "alpha": POSITIVE,
    "beta": POSITIVE,
    "lam": ANY,
    "eps": at_least(0),
    "bins": between(2, 10**6),
    "tau": POSITIVE,
    "ks": KS,
    "taus": Rule("each above 0", lambda taus: all(tau > 0 for tau in taus)),
    "variant": one_of(("out", "in")),
    "m": ANY,
    "gamma": POSITIVE,
    "dim": at_least(2),
    "cutoff": Rule("above 0, below 2", lambda x: 0 < x < 2),
    "nonzero_loss_cutoff": Rule("above 0, below 2", lambda x: 0 < x < 2),
    "t": POSITIVE,
    "b": ANY,
    "learn": ANY,
    "own_proxy": ANY,
    "delta": ANY,
    "s": POSITIVE,
    "margin": Rule("at least 0, below pi", lambda x: 0 <= x < math.pi),
    "mine": ANY,
}
PARAMETER_MEANINGS = {
    "alpha": "how sharply the weights of positives depend on their similarity; in `margin`, the margin "
    "on either side of beta; in `proxy_anchor`, that of both",
    "beta": "how sharply the weights of negatives depend on their similarity; in `margin`, the distance "
    "that separates positives from negatives",
    "lam": "lambda, the similarity that pairs are compared with, or the margin of the loss",
    "eps": "margin of MS mining: it keeps negatives above the least similar positive - eps, and "
    "positives below the most similar negative + eps",
    "bins": "nodes of the histograms between -1 and 1",
    "tau": "temperature: similarities are divided by it",
    "ks": "the k of Recall@k that are made smooth and averaged",
    "taus": "the temperature of each k; where they are not given, tau_k = k",
    "variant": "whether the sum over positives stands outside of the logarithm or in it",
    "m": "relaxation: positives are pulled up to 1 - m, negatives pushed down to m",
    "gamma": "scale of the similarities",
    "dim": "the dimensions of the embeddings, for the density of distances; in a config it follows "
    "`model.embedding_size`",
    "cutoff": "the distance below which negatives are no likelier to be drawn",
    "nonzero_loss_cutoff": "the distance from which on no negative is drawn",
    "t": "scale of the similarities",
    "b": "bias of the logit",
    "learn": "learn beta of `margin`, or t and b of `pairwise_sigmoid`, from their values here on, with "
    "`optim.proxy_lr_factor`",
    "own_proxy": "whether the own proxy counts in the denominator, as in ProxyNCA++",
    "delta": "margin: positives are pulled above delta, negatives pushed below -delta",
    "s": "scale of the cosines",
    "margin": "the angle in radians that is added to that between a sample and its proxy",
    "mine": "put MS mining in front of the weighting",
}


def kind_of(default: Parameter) -> Any:
    """The kind of a parameter for `fit`, from its default."""
    if not isinstance(default, tuple):
        return type(default)
    return NUMBERS if any(isinstance(item, float) for item in default) else WHOLE_NUMBERS


# a word of other programs -> what it may mean here, the likeliest first
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "margin": ("eps", "lam"),
    "epsilon": ("eps",),
    **dict.fromkeys(("base", "thresh", "threshold", "lambda"), ("lam",)),
    **dict.fromkeys(("scale_pos", "pos_scale"), ("alpha",)),
    **dict.fromkeys(("scale_neg", "neg_scale"), ("beta",)),
}


def complete_loss(
    name: object, given: Mapping[str, object]
) -> tuple[dict[str, Parameter], list[Problem]]:
    """All parameters of a loss with defaults filled in, and the problems of the given ones."""
    if not isinstance(name, str) or name not in LOSS_PARAMETERS:
        fix = f"{did_you_mean(name, LOSS_PARAMETERS)}the losses are {', '.join(LOSS_PARAMETERS)}"
        return {}, [Problem("name", name, "unknown loss", fix)]
    mining_is_optional = name not in MINING_SETTLED
    defaults = {**LOSS_PARAMETERS[name], **(MINING if mining_is_optional else {})}
    parameters, problems = dict(defaults), list[Problem]()

    def unknown(key: str, value: object) -> Problem:
        meant = [each for each in SYNONYMS.get(key, ()) if each in LOSS_PARAMETERS[name]]
        close = f"did you mean {meant[0]}? " if meant else did_you_mean(key, defaults)
        fix = f"{close}{name} takes {', '.join(defaults)}"
        return Problem(key, value, "unknown parameter", fix)

    for key, value in given.items():
        if key not in defaults:
            continue
        try:
            parameters[key] = fit(value, kind_of(defaults[key]), PARAMETER_RULES[key])
        except ValueError as rule:
            problems.append(Problem(key, value, str(rule), f"the default is {defaults[key]}"))
    problems += unknown_keys(given, defaults, unknown)
    problems += complete_taus(parameters, given)
    if mining_is_optional and not parameters["mine"]:
        if "eps" in given and given.get("mine", False) is False:
            rule_text = "eps has no effect without mine: true"
            problems.append(Problem("eps", given["eps"], rule_text, "set mine: true or drop eps"))
        del parameters["eps"]
    return parameters, problems


def complete_taus(parameters: dict[str, Parameter], given: Mapping[str, object]) -> list[Problem]:
    """tau_k = k unless the taus are given, one for each k."""
    ks, taus = parameters.get("ks"), parameters.get("taus")
    if not (isinstance(ks, tuple) and isinstance(taus, tuple)):
        return []
    if "taus" not in given:
        parameters["taus"] = tuple(map(float, ks))
    elif len(ks) != len(taus):
        rule = f"must be one for each of the {len(ks)} ks"
        return [Problem("taus", given["taus"], rule, "drop taus for tau_k = k")]
    return []


@dataclass(frozen=True)
class Dataset:
    """Sizes of the standard training split (None: only the shards know) and the K of Recall@K."""

    train_classes: int | None
    train_images: int | None
    ks: tuple[int, ...]


DATASETS: Mapping[str, Dataset] = {
    "sop": Dataset(11_318, 59_551, (1, 10, 100, 1000)),
    "cub200": Dataset(100, 5_864, (1, 2, 4, 8, 16, 32)),
    "cars196": Dataset(98, 8_054, (1, 2, 4, 8, 16, 32)),
    "inshop": Dataset(3_997, 25_882, (1, 10, 20, 30, 40, 50)),
    "icons": Dataset(None, None, (1, 10, 100, 1000)),
    "folder": Dataset(None, None, (1, 2, 4, 8)),
}

BACKBONES = ("bn_inception", "resnet50", "resnet50_v1", "efficientnet_lite0", "convnet")

# of accelerate; TensorBoard is written anyway
TRACKERS = ("wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")


def tracker_names(text: str) -> list[str]:
    """The names in run.trackers, which has commas between them."""
    return [name.strip() for name in text.split(",")]
