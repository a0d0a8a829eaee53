"""General Pair Weighting: every pair loss of the paper, dense and streaming.

- `losses`: each loss under its equation; `pair_loss`: mining in front of weighting
- `algebra`: statistics that merge; `batch`: its layout; `tiles`: blocks of S and their tiles
- `dense`: the reference with autograd; `streaming`: exact, without the m x m matrix, by the sweeps
  of `rows`, `symmetric` or `whole`
- `table`: Table 1 of the paper, computed
"""

from dml.gpw.global_loss import GlobalPairLoss
from dml.gpw.losses import LOSSES, make_loss
from dml.gpw.reference import dense_loss, pair_weights

__all__ = ["LOSSES", "GlobalPairLoss", "dense_loss", "make_loss", "pair_weights"]
