"""Every loss by name, each written under its equation.

- `paper` (MultiSimilarity, Equal, Contrastive, Triplet, LiftedStructure, LiftedStructureStar,
  BinomialDeviance): the losses of the paper's main text
- `supplement` (NPairs, NCA, HistogramLoss, BinLifted): the losses of its supplement
- `softmax` (SupCon, InfoNCE, Circle, PairwiseSigmoid): contrastive losses of later papers
- `margin` (Margin): the margin loss with distance-weighted negatives
- `ranks` (RecallSurrogate, SmoothAP): smooth Recall@K and average precision
- `proxies` (ProxyNCA, ProxyAnchor, NormalisedSoftmax, ArcFace): between samples and proxies of classes
- `exponentials` (softplus, share): functions that several losses share
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, overload

from dml.catalogue import Parameter, complete_loss
from dml.gpw.losses.margin import Margin
from dml.gpw.losses.paper import (
    BinomialDeviance,
    Contrastive,
    Equal,
    LiftedStructure,
    LiftedStructureStar,
    MultiSimilarity,
    Triplet,
)
from dml.gpw.losses.proxies import (
    ArcFace,
    NormalisedSoftmax,
    ProxyAnchor,
    ProxyLoss,
    ProxyNCA,
    ProxyWeighting,
)
from dml.gpw.losses.ranks import RecallSurrogate, SmoothAP
from dml.gpw.losses.softmax import Circle, InfoNCE, PairwiseSigmoid, SupCon
from dml.gpw.losses.supplement import NCA, BinLifted, HistogramLoss, NPairs
from dml.gpw.weighting import Mining, PairLoss, Weighting

__all__ = [
    "LOSSES",
    "NCA",
    "PROXY_LOSSES",
    "ArcFace",
    "BinLifted",
    "BinomialDeviance",
    "Circle",
    "Contrastive",
    "Equal",
    "HistogramLoss",
    "InfoNCE",
    "LiftedStructure",
    "LiftedStructureStar",
    "Margin",
    "MultiSimilarity",
    "NPairs",
    "NormalisedSoftmax",
    "PairwiseSigmoid",
    "ProxyAnchor",
    "ProxyLoss",
    "ProxyNCA",
    "RecallSurrogate",
    "SmoothAP",
    "SupCon",
    "Triplet",
    "make_loss",
]

LOSSES: Mapping[str, type[Weighting]] = MappingProxyType(
    {
        "multi_similarity": MultiSimilarity,
        "ms_weighting": MultiSimilarity,
        "ms_mining": Equal,
        "contrastive": Contrastive,
        "triplet": Triplet,
        "lifted_structure": LiftedStructure,
        "lifted_structure_star": LiftedStructureStar,
        "binomial_deviance": BinomialDeviance,
        "n_pairs": NPairs,
        "nca": NCA,
        "histogram": HistogramLoss,
        "bin_lifted": BinLifted,
        "recall_surrogate": RecallSurrogate,
        "smooth_ap": SmoothAP,
        "supcon": SupCon,
        "info_nce": InfoNCE,
        "circle": Circle,
        "margin": Margin,
        "pairwise_sigmoid": PairwiseSigmoid,
    }
)
"""The weighting of every loss between samples by name, for `GlobalPairLoss`; `dml.catalogue` has their
hyper-parameters. `make_loss` also takes the names of PROXY_LOSSES."""

PROXY_LOSSES: Mapping[str, type[ProxyWeighting]] = MappingProxyType(
    {
        "proxy_nca": ProxyNCA,
        "proxy_anchor": ProxyAnchor,
        "normalised_softmax": NormalisedSoftmax,
        "arcface": ArcFace,
    }
)
"""The losses between samples and proxies, in the same way, for `GlobalProxyLoss`. They have other statistics
than a pair loss, so they are no `Weighting` and stand in a table of their own."""


ProxyLossName = Literal["proxy_nca", "proxy_anchor", "normalised_softmax", "arcface"]


@overload
def make_loss(name: ProxyLossName, **parameters: Parameter) -> ProxyLoss: ...  # type: ignore[overload-overlap]


@overload
def make_loss(name: str, **parameters: Parameter) -> PairLoss: ...


def make_loss(name: str, **parameters: Parameter) -> PairLoss | ProxyLoss:
    """The description of a loss, for `GlobalPairLoss` or, of those in PROXY_LOSSES, `GlobalProxyLoss`.
    Parameters left out take the defaults of `dml.catalogue`.

    >>> make_loss("multi_similarity", alpha=2, beta=40, lam=0.5, eps=0.1).mining
    Mining(eps=0.1)
    >>> make_loss("binomial_deviance", mine=True, eps=0.1).weighting
    BinomialDeviance(alpha=2.0, beta=40.0, lam=0.5)
    """
    complete, problems = complete_loss(name, parameters)
    if problems:
        raise ValueError("; ".join(str(problem) for problem in problems))
    if name in PROXY_LOSSES:
        return ProxyLoss(name, PROXY_LOSSES[name](**complete))
    eps = complete.pop("eps", None)
    complete.pop("mine", None)
    return PairLoss(
        name=name,
        weighting=LOSSES[name](**complete),
        mining=Mining(eps) if isinstance(eps, float) else None,
    )
