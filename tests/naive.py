"""The losses as plain Python loops over anchors and pairs: the oracle of the tests.

Nothing here is imported from `dml`. Each formula is typed from its paper's equation, with `math` and
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


def lifted_structure(pos, neg, lam, tau=1):  # Eq. 6
    if not neg:
        return 0.0
    of_pos = math.log(sum(math.exp((lam - s) / tau) for s in pos))
    of_neg = math.log(sum(math.exp(s / tau) for s in neg))
    return max(of_pos + of_neg, 0)


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


def n_pairs(pos, neg, lam, tau=1):  # Eq. 6 with a single positive, each in turn
    return sum(lifted_structure([p], neg, lam, tau) for p in pos) / len(pos)


def nca(pos, neg, tau=1):  # Supp. Eq. 1, negated
    everything = sum(math.exp(s / tau) for s in pos + neg)
    return -math.log(sum(math.exp(s / tau) for s in pos) / everything)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def bin_lifted(pos, neg, alpha, beta, lam):  # Supp. Eq. 10, value = sum of w S
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


def rank(p, others, tau):
    return 1 + sum(sigmoid((s - p) / tau) for s in others)


def recall_surrogate(pos, neg, tau, ks, taus):  # Patel et al. 2022, without the anchor itself
    ranks = [rank(p, pos[:i] + pos[i + 1 :] + neg, tau) for i, p in enumerate(pos)]
    recalls = [
        min(k, sum(sigmoid((k - r) / tau_k) for r in ranks)) / min(k, len(pos))
        for k, tau_k in zip(ks, taus, strict=True)
    ]
    return 1 - sum(recalls) / len(recalls)


def smooth_ap(pos, neg, tau):  # Brown et al. 2020, without the anchor itself
    total = 0.0
    for i, p in enumerate(pos):
        others = pos[:i] + pos[i + 1 :]
        total += rank(p, others, tau) / rank(p, others + neg, tau)
    return 1 - total / len(pos)


def supcon(pos, neg, tau, variant):  # Khosla et al. 2020, Eq. 2 and 3
    everything = sum(math.exp(s / tau) for s in pos + neg)
    shares = [math.exp(s / tau) / everything for s in pos]
    if variant == "in":
        return -math.log(sum(shares) / len(pos))
    return -sum(math.log(share) for share in shares) / len(pos)


def info_nce(pos, neg, tau):
    return -sum(
        math.log(math.exp(p / tau) / (math.exp(p / tau) + sum(math.exp(n / tau) for n in neg)))
        for p in pos
    ) / len(pos)


def circle(pos, neg, m, gamma):  # Sun et al. 2020, Eq. 6 and 8
    of_neg = sum(math.exp(gamma * max(s + m, 0) * (s - m)) for s in neg)
    of_pos = sum(math.exp(-gamma * max(1 + m - s, 0) * (s - (1 - m))) for s in pos)
    return math.log(1 + of_neg * of_pos)


def pairwise_sigmoid(pos, neg, t, b):  # Zhai et al. 2023
    return -sum(math.log(sigmoid(t * s + b)) for s in pos) - sum(
        math.log(sigmoid(-(t * s + b))) for s in neg
    )


def margin(anchors, alpha, beta, dim, cutoff, nonzero_loss_cutoff):  # Wu et al. 2017, Eq. 4 and 7
    """anchors: (positives, negatives) of every anchor."""

    def distance(s):
        return math.sqrt(max(2 - 2 * s, 1e-8))

    def weight(s):  # 1 / q(D), clipped
        D = math.sqrt(max(2 - 2 * s, 0))
        if nonzero_loss_cutoff <= D:
            return 0.0
        D = max(D, cutoff)
        return 1 / (D ** (dim - 2) * (1 - D**2 / 4) ** ((dim - 3) / 2))

    total = active = 0.0
    for pos, neg in anchors:
        for s in pos:
            hinge = max(alpha + distance(s) - beta, 0)
            total, active = total + hinge, active + (hinge > 0)
        weights = [weight(s) for s in neg]
        for s, w in zip(neg, weights, strict=True):
            if w > 0:
                draws = len(pos) * w / sum(weights)
                hinge = max(alpha - distance(s) + beta, 0)
                total, active = total + draws * hinge, active + draws * (hinge > 0)
    return total / active if active else 0.0


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
    "recall_surrogate": recall_surrogate,
    "smooth_ap": smooth_ap,
    "supcon": supcon,
    "info_nce": info_nce,
    "circle": circle,
    "pairwise_sigmoid": pairwise_sigmoid,
}


def value(name, S, labels, eps=None, **parameters):
    """L(S, y) for a matrix S."""
    S, labels = S.tolist(), labels.tolist()
    m = len(labels)
    if name == "histogram":
        chosen = [pairs(S, labels, i, eps) for i in range(m)]
        pos, neg = ([s for anchor in side for s in anchor] for side in zip(*chosen, strict=True))
        return histogram(pos, neg, **parameters)
    if name == "margin":
        return margin([pairs(S, labels, i, eps) for i in range(m)], **parameters)
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
