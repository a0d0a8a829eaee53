"""From shards to batches of pixels or vectors: which images a step sees, decoded and cropped.

- `deck` (Deck, GroupedDeck, mix, uniforms, shuffled): fair dealing, as a pure function of the deal's
  number
- `preprocessing` (Input, Normalise, train_image, eval_image): decoding, crops, normalisation
- `reading` (JointReader): single images of one or several datasets
- `vectors` (Features, VectorReader, features_of): vectors of features, copied without decoding
- `pair` (PairSpec, inputs_of): what the encoders of two towers expect, as one sample
- `batches` (Batches, Grouping, Mixture, TrainBatches, EvalBatches, held_out, own_share): P classes x M
  images per step
- `towers` (PairBatches, read_partner): the batches of two towers
- `splits` (Splits, Dataset, Subset, read_splits, train_batches): images to train on, to validate and
  to test
- `suspicious` (suspicious): warnings about set-ups that are probably mistakes
- `ahead` (Ahead): shards on a server, downloaded before the batches that need them
- `forking` (fork_context): worker processes that are known to have begun
- `loader` (loader): batches made by worker processes, in order
- `copies` (DeviceCopies): the next batch goes to the GPU while the GPU works on this one
- `sources` (Source, Entry, find_images, in_npy): what to embed, from a folder of files, from shards or
  a .npy file
"""
