"""General Pair Weighting, the mathematics: every pair loss, its definition and its exact computation.

What is computed:

- `losses` (LOSSES, PROXY_LOSSES, make_loss): each loss under its equation
- `weighting` (Weighting, Mining, PairLoss): what a loss consists of; mining in front of weighting
- `statistics` (Statistic, Side, Scope): row statistics that merge
- `reference` (dense_loss, dense_loss_of_towers, dense_proxy_loss, pair_weights): the loss from its
  definition, on the whole matrix

How it is computed:

- `checks` (input_problem, problem_of_identities, largest_similarity, check_batch): what a batch must be
- `grouping` (Groups, GlobalBatch): the batch of all processes, grouped by class
- `columns` (Matches, Slots): anchors against other vectors than the batch
- `engine`: S in tiles
- `memory` (Memory, MemoryTerm, compare): the batch against the embeddings of earlier steps
- `towers` (Towers, ComparedApart, ComparedTogether, compare_towers, problem_of_towers): one set of
  embeddings against another
- `known_gradient` (KnownGradient): a value with its gradient, for autograd
- `global_loss` (GlobalPairLoss, triton_problem): the loss of all processes, as a module
- `proxy_loss` (GlobalProxyLoss): the same with proxies of classes, which the processes share out

What is made of it:

- `monitor` (PairReport, pair_report): which pairs a loss sees in a batch, for the journal
- `table` (dependence, table): Table 1 of the paper, computed
"""

from dml.gpw.global_loss import GlobalPairLoss
from dml.gpw.losses import LOSSES, PROXY_LOSSES, make_loss
from dml.gpw.memory import Memory
from dml.gpw.proxy_loss import GlobalProxyLoss
from dml.gpw.reference import dense_loss, dense_loss_of_towers, dense_proxy_loss, pair_weights

__all__ = [
    "LOSSES",
    "PROXY_LOSSES",
    "GlobalPairLoss",
    "GlobalProxyLoss",
    "Memory",
    "dense_loss",
    "dense_loss_of_towers",
    "dense_proxy_loss",
    "make_loss",
    "pair_weights",
]
