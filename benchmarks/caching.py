"""A step with gradient caching against the plain step: forward and backward of model and loss.

    python benchmarks/caching.py [--batch 128] [--micro-batches 4]

Caching runs the forward pass twice. If a backward pass costs two forward passes, that is 4/3 of the
work, the bound of GradCache. Measured with ResNet-50 at 112 px, random weights and one process.
"""

import sys

import torch
from accelerate import Accelerator
from measure import as_in_training, finish, interleaved, parser, timed

from dml.config import Data, Model
from dml.gpw import GlobalPairLoss, make_loss
from dml.models import make_model
from dml.step import backward

GOAL = "<= 1.4"
SIZE = 112  # with smaller or fewer images, work per weight outweighs work per image


def main() -> int:
    parse = parser(__doc__)
    parse.add_argument("--batch", type=int, default=128, help="images (default: %(default)s)")
    parse.add_argument("--micro-batches", type=int, default=4, help="default: %(default)s")
    parse.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    args = parse.parse_args()
    as_in_training()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    data = Data(dataset="folder", shards="none", size=SIZE)
    model = accelerator.prepare(make_model(Model(backbone="resnet50"), data, seed=0))
    images = torch.randint(256, (args.batch, SIZE, SIZE, 3), dtype=torch.uint8)
    labels = torch.arange(args.batch) // 4
    loss = GlobalPairLoss(make_loss("multi_similarity"))

    def step(micro_batch: int | None) -> None:
        model.zero_grad()
        backward(accelerator, model, loss, images, labels, micro_batch)

    micro_batch = args.batch // args.micro_batches
    work = {"plain": lambda: step(None), "cached": lambda: step(micro_batch)}
    seconds = interleaved(work, args.repeats)
    what = f"{args.batch} images in {args.micro_batches} micro-batches"
    row = timed("caching", what, seconds["cached"], "the plain step", seconds["plain"], GOAL)
    return finish([row], args.json)


if __name__ == "__main__":
    sys.exit(main())
