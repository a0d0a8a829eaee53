"""How the loss is computed: S is cut into tiles, and only a bounded part of it is held at a time.

A step makes two sweeps over the similarities of this process's rows. The first reduces them to row
statistics. The processes exchange these (`global_loss`), and the second sweep turns the similarities
into weights, in place, and these into the gradient of the embeddings.

- The sweeps decide which part of S is computed when. Blocks of rows serve any batch; a process alone
  uses the symmetry of S; a small batch of one process is a single tile.
- A kernel decides what is done to a tile of negatives, where the time goes: the general one serves
  any loss through its statistics and weights, the other computes mined multi-similarity in place.
  The positives of an anchor are few. They are read by index into slots, without tiles.
- Both are chosen once per step from the loss and the batch, and both can be given instead:
  `GlobalPairLoss(loss, kind=RowSweeps)`, `partial(RowSweeps, make_kernel=GeneralKernel.of)`.

The modules, from the ground up:

- `workspace` (Workspace): what one step leaves for the next: buffers, and the last grouping
- `tiles` (RowBlock, Tile, PositiveSlots, spans, row_parts): cutting S
- `views` (AnchorSet, of_batch, select, concatenate, against_positives, against_negatives, of_columns,
  of_partners, of_both, of_anchors): statistics in the shapes of a tile
- `general_kernel` (GeneralKernel): a tile of any loss, through its statistics and weights
- `ms_kernel` (MsKernel): a tile of mined multi-similarity, in place
- `kernel` (TileKernel, TileStatistics, TileWeights, choose_kernel): what a kernel is, and which one
- `rows` (RowSweeps): sweeps over blocks of rows, for any batch
- `rectangle` (RectangleSweeps, RectangleBlock, of_rows, one_sweep_suffices): sweeps of anchors over columns
  that are not the batch
<<<<<<< HEAD
- `proxies` (sweep, PositivePairs, Positives, add_positives): one sweep over samples and proxies
=======
- `both_ways` (BothWays): sweeps over a rectangle whose columns are anchors too, for a process alone
>>>>>>> columns
- `symmetric` (SymmetricSweeps): sweeps over half of S, for a process alone
- `one_tile` (OneTileSweeps): mined multi-similarity of a batch that is a single tile
- `triton_probe` (probe): whether Triton can run a kernel here
- `triton_tuning` (fastest): which block sizes are the fastest on a GPU
- `triton_weights` (Anchors, no_mining): what the kernels of multi-similarity share
- `triton_kept` (KeptSweeps): multi-similarity in Triton, with S in memory
- `triton_ms` (TritonSweeps): multi-similarity in Triton, with S on the chip
- `sweeps` (Sweeps, choose_sweeps): what sweeps are, and which ones
"""
