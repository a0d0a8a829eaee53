"""The exact loss of the global batch and its gradient, without the m x m matrix.

W processes bring b rows each of a global batch of m = W b.

    all-gather the embeddings and labels                               X, m x d
    first sweep over the own rows of S = X X^T:  their statistics
    all-gather the statistics, a few scalars per row
    loss from the statistics
    second sweep:  G_ij + G_ji from S and the statistics of row i and of row j;
                   dL/dX_rows = 1/m (G + G^T) X

S is symmetric, so the part of the gradient that comes from the other anchors, G_ji, needs only
their statistics: backward sends nothing. Memory is O(m d + tile m).

How the sweeps are made is in `engine`.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from dml.distributed.collectives import Wire
from dml.distributed.precision import at_least_float32, full_precision
from dml.errors import LaunchError
from dml.gpw.checks import input_problem, largest_similarity, problem_of_identities
from dml.gpw.engine.sweeps import MakeSweeps, Sweeps, choose_sweeps
from dml.gpw.engine.triton_probe import probe
from dml.gpw.engine.workspace import Workspace
from dml.gpw.grouping import GlobalBatch
from dml.gpw.known_gradient import KnownGradient
from dml.gpw.losses import MultiSimilarity, ProxyLoss
from dml.gpw.memory import Memory, MemoryTerm, compare
from dml.gpw.statistics import Scope, Statistics, constant
from dml.gpw.towers import Towers, compare_towers, problem_of_towers
from dml.gpw.weighting import PairLoss

Kind = Literal["auto", "streaming", "triton"]
KINDS: tuple[Kind, ...] = ("auto", "streaming", "triton")
ROUNDING = 0.05  # of the squared length of a row that was normalised, in half precision


class GlobalPairLoss(nn.Module):
    """A pair loss over the global batch, as a module.

        loss_fn = GlobalPairLoss(make_loss("multi_similarity"))
        loss_fn(embeddings, labels).backward()

    Every process passes its own rows and gets the loss of the global batch, the same on all
    processes; `backward` gives the gradient of its own rows. With reduction="mean" that gradient is
    right for wrappers that average over processes (DDP, DeepSpeed), with "sum" for those that sum.
    Without torch.distributed it is the same function of one process.

    Embeddings are expected to be L2-normalised and are used as they are, as in `dense_loss`, to which
    value and gradient are equal. Half precision is computed in float32. Gradients of gradients are
    refused.

    On a GPU the host does not wait for the loss from the second call on, if `all_labels` is given. A
    batch with NaN or infinity then makes the loss NaN, and `check_finite` says where they are; on a CPU
    `forward` says so itself.

    tile: the number of rows, and of columns, of S worked on at a time. More is faster and takes more
        memory. Below 32 the last bits of S may differ between the two sides of a pair. On a GPU it is
        at least 8,192.
    kind: what computes the sweeps. "streaming" is plain torch, "triton" has kernels for CUDA, "auto"
        is "triton" where that is possible. A function that makes sweeps (`engine.sweeps`) is taken as
        it is, for example `RowSweeps`.
    memory: embeddings of earlier calls, with which each batch is also compared (`memory`); every call
        of the module adds its batch to it.
    wire: counts what was sent.

    With two towers, `loss_fn(x, labels, y, y_labels)` is the mean of both directions (`towers`).
    """

    def __init__(
        self,
        loss: PairLoss,
        tile: int = 1024,
        reduction: Literal["mean", "sum"] = "mean",
        kind: Kind | MakeSweeps = "auto",
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        if isinstance(loss, ProxyLoss):
            raise TypeError(f"{loss.name} compares with proxies: use GlobalProxyLoss")
        if not isinstance(loss, PairLoss):
            raise TypeError(f"loss must come from make_loss, not {loss!r}")
        if not isinstance(tile, int) or tile < 1:
            raise ValueError(f"tile must be a whole number, at least 1, not {tile}")
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction must be 'mean' (for wrappers that average gradients, such as DDP) or "
                f"'sum', not {reduction!r}"
            )
        if not callable(kind) and kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        self.loss = loss
        self.kind = kind
        self.tile = tile
        self.reduction = reduction
        self.memory = memory
        self.wire = Wire()
        self.workspace = Workspace()
        self.warned = False
        self.learned = nn.ParameterDict(
            {k: nn.Parameter(torch.tensor(x)) for k, x in loss.learned.items()}
        )
        self.sharded: dict[str, int] = {}  # every process has all parameters
        self.gradient_norm: Tensor | None = None
        self.probed: dict[torch.device, str | None] = {}  # why Triton does not work there

    def extra_repr(self) -> str:
        return (
            f"{self.loss}, tile={self.tile}, reduction={self.reduction!r}, kind={self.kind!r}"
            + (f", memory={self.memory}" if self.memory else "")
        )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        y: Tensor | None = None,
        y_labels: Tensor | None = None,
        *,
        all_labels: Tensor | None = None,
        all_y_labels: Tensor | None = None,
        identities: Tensor | None = None,
    ) -> Tensor:
        """y, y_labels: the other tower, with which the embeddings are compared instead of each other
        (`towers`).

        all_labels: those of all processes in the order of their ranks, on the CPU, where they are
        known. Nothing about labels is then sent. all_y_labels: those of the other tower. identities: of
        the images of all processes, in the same order and on the CPU, for a memory; None: all images are
        different ones.
        """
        if y is not None and y_labels is not None:
            return self.of_towers((embeddings, labels), (y, y_labels), all_labels, all_y_labels)
        problem = input_problem(embeddings, labels, all_labels is not None)
        if y is not None or y_labels is not None:
            problem = "the other tower needs both embeddings and labels: y and y_labels"
        if problem is None and all_labels is not None:
            problem = problem_of_all(labels, all_labels, self.wire)
        if problem is None and identities is not None:
            problem = problem_of_identities(identities, self.wire.size * len(labels))
        mine = describe(embeddings, labels, all_labels) if problem is None else ""
        self.wire.agree(mine, problem)
        self.loss = self.as_learned()
        X = at_least_float32(embeddings).contiguous()
        dX = X.new_empty(X.shape) if X.requires_grad and torch.is_grad_enabled() else None
        # Wrappers that average divide the gradient of the global loss by W; this restores it.
        scale = self.wire.size if self.reduction == "mean" else 1
        # Inference mode saves what autograd does at every operation. dX is made outside of it, because
        # autograd refuses tensors of inference mode.
        with full_precision(X.device), torch.inference_mode():
            last = self.workspace.groups
            batch = GlobalBatch(X.detach(), labels.contiguous(), self.wire, last, all_labels)
            self.workspace.groups = batch.groups
            self.check_norms(batch.norms)
            wanted = None if dX is None else scale
            term = self.of_memory(batch, X.detach(), identities, wanted)
            sweeps = self.sweeps(batch)
            own = sweeps.statistics()
            value, t = share_statistics(self.loss, batch, own, self.wire, term)
            value, slopes = self.slopes_of(value)
            if not X.is_cpu:  # NaN unless all embeddings are finite
                value = value.add(batch.norms.dot(batch.norms), alpha=0)
            if dX is not None:
                sweeps.gradient(t, scale / self.loss.divisor(batch.groups.m), out=dX)
        if dX is None:
            return value.to(X.dtype, copy=True)
        dX = batch.in_input_order(dX)
        if term is not None and term.gradient is not None:
            dX += term.gradient
        return self.attached(value, [(X, dX)], slopes)

    def as_learned(self) -> PairLoss:
        """The loss with what it has learned so far. A GPU is waited for, if it learns."""
        if not self.learned:
            return self.loss
        return self.loss.at({name: p.item() for name, p in self.learned.items()})

    def slopes_of(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the gradient of what is learned: the same on all processes."""
        if not self.learned:
            return value, value.new_empty(0)
        self.gradient_norm = torch.linalg.vector_norm(value[1:])
        return value[0], value[1:]

    def attached(self, value: Tensor, known: list[tuple[Tensor, Tensor]], slopes: Tensor) -> Tensor:
        """The loss with its gradients: of embeddings, and of what is learned, which no wrapper averages."""
        parameters = [self.learned[name] for name in self.loss.learned]  # it sorts its own keys
        of_parameters = [x.to(p) for p, x in zip(parameters, slopes.clone(), strict=True)]
        inputs, gradients = zip(*known, strict=True)
        attached: Tensor = KnownGradient.apply(  # type: ignore[no-untyped-call]
            value, *inputs, *parameters, *gradients, *of_parameters
        )
        return attached

    def of_memory(
        self, batch: GlobalBatch, own: Tensor, identities: Tensor | None, scale: float | None
    ) -> MemoryTerm | None:
        """The part of the loss by the memory, which then takes the batch. scale: of the gradient; None: no
        gradient."""
        memory = self.memory
        if memory is None:
            return None
        m, labels = batch.groups.m, batch.labels.cpu()
        ids, mine = memory.named(identities, m), slice(batch.rank * len(own), None)
        labels_of_own, ids_of_own = (x[mine][: len(own)] for x in (labels, ids))
        given = labels_of_own, ids_of_own, m, scale, self.tile_on(own.device)
        term = compare(self.loss, memory, own, *given, self.workspace, self.wire)
        memory.enqueue(batch.gathered, labels, ids)
        return term

    def of_towers(
        self,
        x: tuple[Tensor, Tensor],
        y: tuple[Tensor, Tensor],
        all_labels: Tensor | None,
        all_y_labels: Tensor | None,
    ) -> Tensor:
        known = (all_labels, all_y_labels)
        problem = problem_of_towers(x[0], y[0], known)
        if self.memory is not None:
            problem = "a memory is for one set of embeddings, not for two towers; make the loss without it"
        for name, (own, labels), of_all in (("x", x, all_labels), ("y", y, all_y_labels)):
            wrong = input_problem(own, labels, of_all is not None)
            if wrong is None and of_all is not None:
                wrong = problem_of_all(labels, of_all, self.wire)
            problem = problem or (wrong and f"{name}: {wrong}")
        mine = ""
        if problem is None:
            mine = f"{describe(*x, all_labels)}, {describe(*y, all_y_labels)}"
        self.wire.agree(mine, problem)
        self.loss = self.as_learned()
        inputs = [at_least_float32(own).contiguous() for own, _ in (x, y)]
        scale = self.wire.size if self.reduction == "mean" else 1
        wanted = [X.requires_grad and torch.is_grad_enabled() for X in inputs]
        with full_precision(inputs[0].device), torch.no_grad():
            both = [(X.detach(), z.contiguous()) for X, (_, z) in zip(inputs, (x, y), strict=True)]
            given = None
            if all_labels is not None and all_y_labels is not None:
                given = all_labels, all_y_labels
            towers = Towers(both[0], both[1], given, self.wire)
            self.check_norms(towers.norms)
            tile = self.tile_on(inputs[0].device)
            compared = compare_towers(self.loss, towers, tile, self.workspace, self.wire)
            value, slopes = self.slopes_of(compared.value)
            if not inputs[0].is_cpu:
                value = value.add(towers.norms.dot(towers.norms), alpha=0)
            gradients = compared.gradients(scale, wanted)
        pairs = [(X, dX) for X, dX in zip(inputs, gradients, strict=True) if dX is not None]
        if not pairs:
            return value.to(inputs[0].dtype, copy=True)
        return self.attached(value, pairs, slopes)

    def check_norms(self, norms: Tensor) -> None:
        """The lengths of all embeddings: looked at now, except on a GPU, which would be waited for."""
        first, self.workspace.norms = self.workspace.norms is None, norms
        if first or norms.is_cpu:
            self.check_finite()

    def uses_triton(self, X: Tensor) -> bool:
        """Whether Triton computes this batch, the same on all processes. The first time, each of them
        runs a tiny kernel; if that fails on one, "auto" streams and says so, and "triton" raises."""
        if self.kind == "streaming":
            return False
        problem = triton_problem(self.loss, X.dtype, X.device)
        if problem is None and X.device not in self.probed:
            found = self.wire.everyone(probe(X.device))
            failed = [f"on process {rank}, {why}" for rank, why in enumerate(found) if why]
            self.probed[X.device] = "; ".join(failed) or None
            if failed and self.kind == "auto" and self.wire.rank == 0:
                warnings.warn(
                    f"the loss is computed without Triton ({self.probed[X.device]})", stacklevel=5
                )
        if problem is None and self.probed[X.device]:
            problem = f"engine.kind=triton: {self.probed[X.device]}; set engine.kind=auto"
        if problem is not None and self.kind == "triton":
            raise LaunchError(problem)
        return problem is None

    def check_finite(self) -> None:
        """Raise NotFiniteError, with the first row, if the last batch held NaN or infinity. It also
        warns once, on the first process, if embeddings are not normalised. It waits for a GPU."""
        assert self.workspace.norms is not None, "there was no batch yet"
        largest = largest_similarity(self.workspace.norms, self.wire.size)
        if not self.warned and self.wire.rank == 0 and abs(largest - 1) > ROUNDING:
            self.warned = True
            warnings.warn(
                f"embeddings are not L2-normalised (the longest has length {largest**0.5:.3g}); the "
                "losses expect similarities between -1 and 1: use torch.nn.functional.normalize",
                stacklevel=4,
            )

    def sweeps(self, batch: GlobalBatch) -> Sweeps:
        if callable(self.kind):
            make = self.kind
        else:
            make = triton_sweeps if self.uses_triton(batch.X) else choose_sweeps
        return make(self.loss, batch, self.tile_on(batch.X.device), self.workspace)

    def tile_on(self, device: torch.device) -> int:
        return max(self.tile, self.workspace.cutting(device).least_tile)


def triton_problem(
    loss: PairLoss | ProxyLoss, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why Triton's kernels cannot compute this loss here, in a sentence; None if they can, as far as
    one can tell without running one."""
    instead = "set engine.kind=auto"
    if not isinstance(loss.weighting, MultiSimilarity):
        return f"engine.kind=triton computes multi_similarity and ms_weighting, not {loss.name}; {instead}"
    if dtype != torch.float32:
        return f"engine.kind=triton computes in float32, not {dtype}; {instead}"
    if device.type != "cuda":
        return (
            f"engine.kind=triton needs a CUDA GPU, and this process computes on {device}; {instead}"
        )
    return None


def triton_sweeps(loss: PairLoss, batch: GlobalBatch, tile: int, workspace: Workspace) -> Sweeps:
    from dml.gpw.engine.triton_kept import KeptSweeps
    from dml.gpw.engine.triton_ms import TritonSweeps

    make = KeptSweeps if KeptSweeps.fits(batch, workspace) else TritonSweeps
    return make(loss, batch, tile, workspace)


def problem_of_all(labels: Tensor, all_labels: Tensor, wire: Wire) -> str | None:
    """Why these are not the labels of all processes, in a sentence; None if they are."""
    b, rank = len(labels), wire.rank
    if not all_labels.is_cpu or all_labels.shape != (wire.size * b,):
        return (
            f"all_labels must be the labels of all {wire.size} processes, on the CPU: "
            f"{wire.size * b} numbers, not {tuple(all_labels.shape)} on {all_labels.device}"
        )
    if labels.is_cpu and not torch.equal(all_labels[rank * b : (rank + 1) * b].to(labels), labels):
        return f"the labels of process {rank} are not those that all_labels has for it"
    return None


def describe(embeddings: Tensor, labels: Tensor, all_labels: Tensor | None) -> str:
    """What a process passes, to be compared with the others."""
    shape = tuple(embeddings.shape)
    given = f"{shape} {embeddings.dtype} with {tuple(labels.shape)} {labels.dtype}"
    return given if all_labels is None else f"{given} and all labels"


def share_statistics(
    loss: PairLoss,
    batch: GlobalBatch,
    own: Statistics,
    wire: Wire,
    term: MemoryTerm | None = None,
) -> tuple[Tensor, Statistics]:
    """The loss, with slopes if something is learned, and the statistics of all m rows that its weights
    use, from those of the own rows. Sums over processes are taken in the order of ranks, so all processes
    get the same bits. term: what a memory adds to the loss; its sum over the own anchors is sent as part
    of that of the batch."""
    if loss.has_anchors:
        own_sum = loss.totals_of_anchors(own)
    else:
        own_sum = constant(0, torch.float64, batch.X.device)
    if term is not None:
        own_sum = own_sum + term.own_sum
    sums, *gathered = wire.gather(own_sum, *(own[n] for n in loss.shared_statistics))
    t = {}
    for name, x in zip(loss.shared_statistics, gathered, strict=True):
        if loss.scopes[name] is Scope.BATCH:
            t[name] = x.sum(0)
        else:
            t[name] = batch.in_grouped_order(x)
    value = sums.sum(0) / batch.groups.m if loss.has_anchors else loss.totals_of_batch(t)
    if term is not None and term.value is not None:
        value = value + term.value
    return value, t
