"""What the loss costs per process and step: bytes sent, FLOPs, memory.

The formulas and their reasons are in docs/scale.md; benchmarks/scale.py measures them. The engine
takes its block sizes from here, so the plan describes what the engine does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dml.catalogue import PROXY_LOSSES, Parameter

GIB, MIB = 2**30, 2**20
FP32 = 4
LABEL = 8  # int64
LOSS_SHARE = SUM = 8  # float64, once per process
# Of multi-similarity: minimum positive, maximum negative and the log-sum-exps of the mined positives
# and negatives. Other losses are counted alike: beside an embedding the statistics are negligible.
ROW_STATISTICS = 4


@dataclass(frozen=True)
class Cutting:
    """How much of S the loss works on at a time.

    least_tile: the least number of rows, and of columns, of a tile, whatever is asked for.
    part_pairs: the pairs of a tile worked on at a time. None: all.
    strip: the rows multiplied at a time in a tile on the diagonal, of which one half is then a copy of
        the other. None: all, and nothing is copied.
    kept_bytes: S of a process's own rows is kept between the two sweeps up to so many bytes.
    block_bytes: at most so many bytes of S are worked on at a time, or 64 rows.
    """

    least_tile: int
    part_pairs: int | None
    strip: int | None
    kept_bytes: int
    block_bytes: int


# Parts of a tile stay in the cache of a core.
CPU = Cutting(1, 2**18, 384, kept_bytes=64 * MIB, block_bytes=256 * MIB)
KEPT_SHARE = 4  # a quarter of what is free


def on_gpu(free: int) -> Cutting:
    """The launch of a kernel takes as long as 50,000 multiplications per core, and there is no cache to
    stay in: few large tiles, in one part. free: bytes."""
    tile = 16_384 if free >= 24 * GIB else 8_192  # a few matrices of 1 GiB, or of 256 MiB
    return Cutting(tile, None, None, kept_bytes=free // KEPT_SHARE, block_bytes=2 * GIB)


# Matrices of tile x tile that multi-similarity holds at its peak, with one process and with several,
# including the buffers of the libraries; measured with benchmarks/scale.py (docs/log.md). Other losses
# take more.
WORKING_TILES, WORKING_TILES_BY_ROWS = 2, 5


@dataclass(frozen=True)
class MemoryCost:
    """What a cross-batch memory costs per process; the FLOPs, and the bytes that it sends while it is
    used, are those of a step."""

    size: int
    from_step: int
    bytes: int
    flops: int
    bytes_sent: int

    def __str__(self) -> str:
        held = f"the last {self.size:,} embeddings, from step {self.from_step:,} on"
        work = f"{self.flops / 1e9:,.3g} GFLOP per process and step"
        sent = f", {in_units(self.bytes_sent)} sent" if self.bytes_sent else ""
        return f"{held}: {in_units(self.bytes)} per process, {work}{sent}"


def memory_cost(
    size: int, from_step: int, b: int, d: int, tile: int, bytes_sent: int = 0
) -> MemoryCost:
    """The embeddings with labels and identities, S of the rows worked on at a time, and the gradient; S = A Y^T
    and G Y."""
    rows = b if FP32 * b * size <= CPU.kept_bytes else rows_at_a_time(b, size, tile)
    held = size * (FP32 * d + 2 * LABEL) + FP32 * (rows * size + b * d)
    return MemoryCost(size, from_step, held, 2 * 2 * b * size * d, bytes_sent)


def memory_bytes_sent(name: str, parameters: Mapping[str, Parameter], processes: int) -> int:
    """The sums over all pairs with the memory, in float64, of a loss that is one number of the whole batch:
    two histograms, or two sums each of the positives and the negatives. Other losses send nothing."""
    sums = {"histogram": 2 * parameters.get("bins", 0), "margin": 4}.get(name, 0)
    assert isinstance(sums, int)
    return (processes - 1) * SUM * sums


def loss_bytes_sent(m: int, d: int, processes: int) -> int:
    """Two ring all-gathers: embeddings with labels, then row statistics. Backward sends nothing."""
    row = FP32 * d + LABEL + FP32 * ROW_STATISTICS
    return (processes - 1) * (m // processes * row + LOSS_SHARE)


def loss_flops(m: int, d: int, processes: int) -> int:
    """The matrix products only, on a CPU. One process: half of S in each of the two sweeps, or in one sweep as
    far as it is kept, and G X. Several: S of own rows, twice unless it is kept, and G X."""
    b = m // processes
    S = FP32 * b * m // (2 if processes == 1 else 1)
    kept = CPU.kept_bytes
    sweeps = 2 - min(1.0, kept / S) if processes == 1 else 1 + (S > kept)
    return round(2 * d * (S // FP32 * sweeps + b * m))


def rows_at_a_time(b: int, m: int, tile: int, size: int = FP32, cutting: Cutting = CPU) -> int:
    """How many of b own rows of S, m numbers of `size` bytes each, the loss works on at a time."""
    return min(b, tile, max(64, cutting.block_bytes // (size * m)))


def loss_memory(m: int, d: int, processes: int, tile: int) -> int:
    """On a CPU, for classes of a few images. The triplet loss also keeps all positives, m x per_class."""
    b = m // processes
    gathered = 2 * m * d if processes > 1 else 0  # as it arrives, and split by process
    gradient = 2 * b * d  # of the loss, and scaled for the model
    rows = min(b, tile) if processes == 1 else rows_at_a_time(b, m, tile)
    tiles = (WORKING_TILES if processes == 1 else WORKING_TILES_BY_ROWS) * rows * min(tile, m)
    kept = CPU.kept_bytes // FP32
    S = b * m if b * m <= kept else rows * m
    if processes == 1:
        S = min(kept, m * (m + tile) // 2)
    return FP32 * (gathered + gradient + ROW_STATISTICS * m + S + tiles) + LABEL * m


def towers_flops(m: int, d: int, processes: int) -> int:
    """One process: S, twice unless it is kept, and the gradients of both towers. Several: each direction
    as the rows of one batch."""
    if processes > 1:
        return 2 * loss_flops(m, d, processes)
    sweeps = 1 + (FP32 * m * m > CPU.kept_bytes)
    return 2 * d * m * m * (sweeps + 2)


def towers_memory(m: int, d: int, processes: int, tile: int) -> int:
    """Both towers as gathered, their gradients, and S; of several processes, of both directions."""
    b, directions = m // processes, 1 if processes == 1 else 2
    gathered = 2 * m * d if processes > 1 else 0  # as it arrives, and split by process
    rows = rows_at_a_time(b, m, tile)
    S = (b if FP32 * b * m <= CPU.kept_bytes else rows) * m * directions
    tiles = WORKING_TILES_BY_ROWS * rows * min(tile, m)
    of_each = gathered + 2 * b * d + ROW_STATISTICS * m
    return FP32 * (2 * of_each + S + tiles) + 2 * LABEL * m


def known(number: float | None) -> str:
    """A number that may not be known yet, for people."""
    if number is None:
        return "unknown until the shards are read"
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"


def in_units(count: int) -> str:
    """Bytes, for people."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:,.1f} {unit}"


# What the loss of proxies holds per proxy, in vectors: the proxy, the same at unit length, its gradient.
PROXY_VECTORS = 3
OPTIMIZER_SLOTS = {"adam": 2, "adamw": 2, "sgd": 1}
PAIR_OF_SUMS = 16  # two float64: of an anchor the log-sum-exps, of a process its loss and gradient


def classes_of(rank: int, processes: int, classes: int) -> tuple[int, int]:
    """The first class whose proxy a process holds, and how many it holds: blocks of equal size, to one."""
    first = classes * rank // processes
    return first, classes * (rank + 1) // processes - first


def proxy_rows_at_a_time(
    rows: int, columns: int, anchors: str, size: int = FP32, cutting: Cutting = CPU
) -> int:
    """How many anchors the loss of proxies works on at a time, with all of their columns. If they are
    samples, the processes tell each other their statistics after every block: few large ones."""
    most = cutting.block_bytes if anchors == "samples" else cutting.kept_bytes
    return min(rows, max(64, most // (size * max(1, columns))))


def proxy_bytes_sent(m: int, d: int, processes: int, anchors: str) -> int:
    """An all-gather of the embeddings with labels; if the anchors are samples, all-gathers of the
    log-sum-exps of all m rows; one of the losses; a reduce-scatter of the gradient of the embeddings. No
    proxy is sent."""
    b = m // processes
    rows = m * PAIR_OF_SUMS if anchors == "samples" else 0
    return (processes - 1) * (b * (FP32 * d + LABEL) + rows + PAIR_OF_SUMS + b * FP32 * d)


def proxy_flops(m: int, d: int, processes: int, classes: int) -> int:
    """The similarities, and the gradients of both sides."""
    return 3 * 2 * m * d * -(-classes // processes)


def proxy_memory(d: int, processes: int, classes: int, optimizer: str) -> int:
    """The proxies of a process, their gradient, and what the optimizer keeps."""
    vectors = PROXY_VECTORS + OPTIMIZER_SLOTS[optimizer]
    return FP32 * d * vectors * -(-classes // processes)


def proxy_loss_memory(m: int, d: int, processes: int, classes: int, anchors: str) -> int:
    """Without the proxies: the gathered embeddings and their gradient, and a block of S."""
    own = -(-classes // processes)
    rows, columns = (m, own) if anchors == "samples" else (own, m)
    block = proxy_rows_at_a_time(rows, columns, anchors) * columns
    gathered = 2 * m * d if processes > 1 else 0  # as it arrives, and split by process
    return FP32 * (gathered + 2 * m * d + block) + LABEL * m


def costs_of_loss(
    name: str, m: int, d: int, processes: int, tile: int, classes: int, optimizer: str, towers: bool
) -> dict[str, int]:
    """What a loss sends, holds and computes, as the plan has it. classes: those that are trained on."""
    if towers:
        return {
            "loss_bytes_sent": 2 * loss_bytes_sent(m, d, processes),
            "loss_memory": towers_memory(m, d, processes, tile),
            "loss_flops": towers_flops(m, d, processes),
        }
    if name not in PROXY_LOSSES:
        return {
            "loss_bytes_sent": loss_bytes_sent(m, d, processes),
            "loss_memory": loss_memory(m, d, processes, tile),
            "loss_flops": loss_flops(m, d, processes),
        }
    anchors = PROXY_LOSSES[name]
    return {
        "loss_bytes_sent": proxy_bytes_sent(m, d, processes, anchors),
        "loss_memory": proxy_loss_memory(m, d, processes, classes, anchors),
        "loss_flops": proxy_flops(m, d, processes, classes),
        "proxy_memory": proxy_memory(d, processes, classes, optimizer),
    }
