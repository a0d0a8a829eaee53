"""The losses of the paper as plain Python loops over anchors and pairs: the oracle of the tests.

Nothing here is imported from `dml`. Each formula is typed from the paper's equation, with `math` and
without regard to speed or overflow. Sums over positives leave out the anchor. An anchor without a
(selected) positive contributes zero.
"""

import math

import torch


def pairs(S, labels, i, eps=None):
    """The similarities of the positive and negative pairs of anchor i; with eps, the mined ones."""
    m = len(labels)
    positives = [S[i][j] for j in range(m) if j != i and labels[j] == labels[i]]
    negatives = [S[i][j] for j in range(m) if labels[j] != labels[i]]
    if eps is None:
        return positives, negatives
    mined_negatives = [s for s in negatives if positives and s > min(positives) - eps]  # Eq. 11
    mined_positives = [s for s in positives if negatives and s < max(negatives) + eps]  # Eq. 12
    return mined_positives, mined_negatives


def multi_similarity(pos, neg, alpha, beta, lam):  # Eq. 15
    return (
        math.log(1 + sum(math.exp(-alpha * (s - lam)) for s in pos)) / alpha
        + math.log(1 + sum(math.exp(beta * (s - lam)) for s in neg)) / beta
    )


def equal(pos, neg):
    return sum(neg) - sum(pos)


def contrastive(pos, neg, lam):  # Eq. 4
    return sum(max(s - lam, 0) for s in neg) - sum(pos)


def triplet(pos, neg, lam):  # Eq. 5
    return sum(max(n - p + lam, 0) for p in pos for n in neg)


def lifted_structure(pos, neg, lam):  # Eq. 6
    if not neg:
        return 0.0
    return max(
        math.log(sum(math.exp(lam - s) for s in pos)) + math.log(sum(math.exp(s) for s in neg)), 0
    )


def lifted_structure_star(pos, neg, alpha, beta):  # Eq. 16
    total = math.log(sum(math.exp(-alpha * s) for s in pos)) / alpha
    if neg:
        total += math.log(sum(math.exp(beta * s) for s in neg)) / beta
    return total


def binomial_deviance(pos, neg, alpha, beta, lam):  # Eq. 9
    total = sum(math.log(1 + math.exp(alpha * (lam - s))) for s in pos) / len(pos)
    if neg:
        total += sum(math.log(1 + math.exp(beta * (s - lam))) for s in neg) / len(neg)
    return total


def n_pairs(pos, neg, lam):  # Eq. 6 with a single positive, each in turn
    return sum(lifted_structure([p], neg, lam) for p in pos) / len(pos)


def nca(pos, neg):  # Supp. Eq. 1, negated
    everything = sum(math.exp(s) for s in pos + neg)
    return -math.log(sum(math.exp(s) for s in pos) / everything)


def bin_lifted(pos, neg, alpha, beta, lam):  # Supp. Eq. 10, value = sum of w S
    def sigmoid(x):
        return math.exp(x) / (1 + math.exp(x))

    all_pos = sum(math.exp(-alpha * s) for s in pos)
    all_neg = sum(math.exp(beta * s) for s in neg)
    return sum(
        s * (sigmoid(beta * (s - lam)) + math.exp(beta * s) / all_neg) / 2 for s in neg
    ) - sum(s * (sigmoid(alpha * (lam - s)) + math.exp(-alpha * s) / all_pos) / 2 for s in pos)


def histogram(pos, neg, bins):  # Supp. Eq. 3-5, over the pairs of all anchors
    delta = 2 / (bins - 1)
    nodes = [-1 + r * delta for r in range(bins)]

    def estimate(similarities):
        return [
            sum(max(0.0, 1 - abs(s - t) / delta) for s in similarities) / len(similarities)
            for t in nodes
        ]

    if not pos or not neg:
        return 0.0
    h_pos, h_neg = estimate(pos), estimate(neg)
    return sum(h_neg[r] * sum(h_pos[: r + 1]) for r in range(bins))


PER_ANCHOR = {
    "multi_similarity": multi_similarity,
    "ms_weighting": multi_similarity,
    "ms_mining": equal,
    "contrastive": contrastive,
    "triplet": triplet,
    "lifted_structure": lifted_structure,
    "lifted_structure_star": lifted_structure_star,
    "binomial_deviance": binomial_deviance,
    "n_pairs": n_pairs,
    "nca": nca,
    "bin_lifted": bin_lifted,
}


def value(name, S, labels, eps=None, **parameters):
    """L(S, y) for a matrix S."""
    S, labels = S.tolist(), labels.tolist()
    m = len(labels)
    if name == "histogram":
        chosen = [pairs(S, labels, i, eps) for i in range(m)]
        pos, neg = ([s for anchor in side for s in anchor] for side in zip(*chosen, strict=True))
        return histogram(pos, neg, **parameters)
    total = 0.0
    for i in range(m):
        pos, neg = pairs(S, labels, i, eps)
        if pos:
            total += PER_ANCHOR[name](pos, neg, **parameters)
    return total / m


def ms_loss_and_gradient(X, labels, alpha, beta, lam, eps):
    """Eq. 11-15 anchor by anchor, and the gradient from the weights of Eq. 13 and 14."""
    m = len(labels)
    S = X @ X.T
    loss, grad = 0.0, torch.zeros_like(X)
    for i in range(m):
        pos = [j for j in range(m) if j != i and labels[j] == labels[i]]
        neg = [j for j in range(m) if labels[j] != labels[i]]
        if not pos or not neg:
            continue
        hardest_pos = min(S[i, j] for j in pos)
        hardest_neg = max(S[i, j] for j in neg)
        neg = [j for j in neg if S[i, j] > hardest_pos - eps]
        pos = [j for j in pos if S[i, j] < hardest_neg + eps]
        if not pos or not neg:
            continue
        loss += torch.log(1 + sum(torch.exp(-alpha * (S[i, k] - lam)) for k in pos)) / alpha
        loss += torch.log(1 + sum(torch.exp(beta * (S[i, k] - lam)) for k in neg)) / beta
        for j in neg:
            w = 1 / (
                torch.exp(beta * (lam - S[i, j]))
                + sum(torch.exp(beta * (S[i, k] - S[i, j])) for k in neg)
            )
            grad[i] += w * X[j]
            grad[j] += w * X[i]
        for j in pos:
            w = 1 / (
                torch.exp(-alpha * (lam - S[i, j]))
                + sum(torch.exp(-alpha * (S[i, k] - S[i, j])) for k in pos)
            )
            grad[i] -= w * X[j]
            grad[j] -= w * X[i]
    return loss / m, grad / m
