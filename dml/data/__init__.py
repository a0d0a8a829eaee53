"""From shards to batches of pixels: which images a step sees, decoded and cropped.

- `deck` (Deck, mix, uniforms, shuffled): fair dealing, as a pure function of the deal's number
- `preprocessing` (Input, Normalise, train_image, eval_image): decoding, crops, normalisation
- `batches` (Batches, TrainBatches, EvalBatches, held_out, own_share): P classes x M images per step
- `splits` (Splits, Subset, read_splits, train_batches): images to train on, to validate and to test
- `suspicious` (suspicious): warnings about set-ups that are probably mistakes
- `ahead` (Ahead): shards on a server, downloaded before the batches that need them
- `loader` (loader): batches made by worker processes, in order
- `copies` (DeviceCopies): the next batch goes to the GPU while the GPU works on this one
- `sources` (Source, Entry, find_images): images to embed, from a folder of files or from shards
"""
