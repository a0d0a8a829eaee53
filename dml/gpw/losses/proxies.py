"""Losses between samples and proxies, one learned vector per class, each under its equation.

S is the cosine of a sample and a proxy. A pair is positive if the sample is of the proxy's class. In
`proxy_anchor` the anchors are the proxies and their pairs the samples of the batch; in the others the
anchors are the samples, and the own proxy is the only positive.

Every one of them is a function of two log-sum-exps per anchor, so that is all that processes with
different proxies tell each other:

    lse_neg = log sum_neg e^{scale S + shift}        lse_pos = log sum_pos e^{positive_term(S)}
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from dml.gpw.losses.exponentials import softplus
from dml.gpw.statistics import Exponent


class Anchors(Enum):
    """Whose pairs a loss of proxies compares."""

    SAMPLES = "samples"
    PROXIES = "proxies"


@dataclass(frozen=True)
class Number:
    """How many anchors there are on all processes, and how many of them have a positive."""

    all: int
    with_positives: int


class ProxyWeighting(ABC):
    """How the pairs of samples and proxies are weighted."""

    anchors: ClassVar[Anchors] = Anchors.SAMPLES

    @property
    @abstractmethod
    def negative(self) -> Exponent:
        """The exponent of a negative pair."""

    @abstractmethod
    def positive_term(self, S: Tensor) -> Tensor:
        """The exponent of a positive pair."""

    @abstractmethod
    def positive_slope(self, S: Tensor) -> Tensor:
        """The derivative of `positive_term`."""

    @abstractmethod
    def value(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> Tensor:
        """What each anchor adds to the loss. A log-sum-exp without pairs is -inf."""

    @abstractmethod
    def slopes(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> tuple[Tensor, Tensor]:
        """The derivatives of `value` by lse_pos and lse_neg."""


class SoftmaxOfProxies(ProxyWeighting):
    """-log of the own proxy's share in a softmax over all proxies; the mean over the m samples."""

    def positive_term(self, S: Tensor) -> Tensor:
        return self.negative.scale * S

    def positive_slope(self, S: Tensor) -> Tensor:
        return torch.full_like(S, self.negative.scale)

    def value(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> Tensor:
        return softplus(lse_neg - lse_pos) / n.all

    def slopes(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> tuple[Tensor, Tensor]:
        confusion = torch.sigmoid(lse_neg - lse_pos) / n.all
        return -confusion, confusion


@dataclass(frozen=True)
class ProxyNCA(SoftmaxOfProxies):
    """Movshovitz-Attias et al., No Fuss Distance Metric Learning using Proxies, ICCV 2017, Eq. 4;
    Teh et al., ProxyNCA++, ECCV 2020, Eq. 6, with own_proxy.

    -log[ e^{-D^2 / tau} / sum e^{-D^2 / tau} ],  D^2 = 2 - 2 S

    The sum runs over the proxies of the other classes, and with own_proxy also over the own one: it is
    then a probability, and the loss not below 0.
    """

    tau: float
    own_proxy: bool

    @property
    def negative(self) -> Exponent:
        return Exponent(2 / self.tau)  # the constant 2 / tau of D^2 cancels

    def value(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> Tensor:
        if self.own_proxy:
            return super().value(lse_pos, lse_neg, n)
        return (lse_neg - lse_pos) / n.all

    def slopes(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> tuple[Tensor, Tensor]:
        if self.own_proxy:
            return super().slopes(lse_pos, lse_neg, n)
        one = torch.full_like(lse_neg, 1 / n.all)
        return -one, one


@dataclass(frozen=True)
class NormalisedSoftmax(SoftmaxOfProxies):
    """Zhai and Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019, Eq. 2.

    -log[ e^{S / tau} / sum e^{S / tau} ]  over all proxies
    """

    tau: float

    @property
    def negative(self) -> Exponent:
        return Exponent(1 / self.tau)


@dataclass(frozen=True)
class ArcFace(SoftmaxOfProxies):
    """Deng et al., ArcFace, CVPR 2019, Eq. 3.

    -log[ e^{s phi(S)} / (e^{s phi(S)} + sum_neg e^{s S}) ],  phi = cos(theta + margin),  S = cos theta

    For theta + margin > pi, where the cosine would rise again, phi = S - margin sin(margin), as in
    their code.
    """

    s: float
    margin: float

    @property
    def negative(self) -> Exponent:
        return Exponent(self.s)

    def sine(self, S: Tensor) -> Tensor:
        """sin theta, at least 1e-4: the slope of theta would be infinite at S = 1, and rounding can
        carry S beyond."""
        return (1 - S * S).clamp(min=1e-8).sqrt()

    def is_monotonic(self, S: Tensor) -> Tensor:
        return -math.cos(self.margin) <= S  # theta + margin <= pi

    def positive_term(self, S: Tensor) -> Tensor:
        turned = math.cos(self.margin) * S - math.sin(self.margin) * self.sine(S)
        beyond = S - self.margin * math.sin(self.margin)
        return self.s * torch.where(self.is_monotonic(S), turned, beyond)

    def positive_slope(self, S: Tensor) -> Tensor:
        inside = S * S <= 1 - 1e-8  # elsewhere the sine is constant
        turned = math.cos(self.margin) + math.sin(self.margin) * torch.where(
            inside, S / self.sine(S), 0
        )
        return self.s * torch.where(self.is_monotonic(S), turned, 1)


@dataclass(frozen=True)
class ProxyAnchor(ProxyWeighting):
    """Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, Eq. 4.

    1/|P+| sum_{P+} log[1 + sum_pos e^{-alpha (S - delta)}] + 1/|P| sum_P log[1 + sum_neg e^{alpha (S + delta)}]

    P: all proxies; P+: those with a sample in the batch. An anchor is a proxy.
    """

    alpha: float
    delta: float
    anchors: ClassVar[Anchors] = Anchors.PROXIES

    @property
    def negative(self) -> Exponent:
        return Exponent(self.alpha, self.alpha * self.delta)

    def positive_term(self, S: Tensor) -> Tensor:
        return -self.alpha * (S - self.delta)

    def positive_slope(self, S: Tensor) -> Tensor:
        return torch.full_like(S, -self.alpha)

    def value(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> Tensor:
        return softplus(lse_pos) / n.with_positives + softplus(lse_neg) / n.all

    def slopes(self, lse_pos: Tensor, lse_neg: Tensor, n: Number) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(lse_pos) / n.with_positives, torch.sigmoid(lse_neg) / n.all


@dataclass(frozen=True)
class ProxyLoss:
    """A loss's description: an immutable value made by `make_loss`."""

    name: str
    weighting: ProxyWeighting
