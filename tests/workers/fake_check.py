"""The checks of a device, on one that is no GPU but keeps a GPU's rules: python fake_check.py SIZES"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from fakegpu import FakeGPU

from dml.gpu_check.exact import loss_lines, recall_lines
from dml.gpu_check.place import Sizes


def main(sizes):
    device, given = torch.device("fakegpu"), Sizes(**json.loads(sizes))
    with FakeGPU():
        for line in (*loss_lines(device, given), *recall_lines(device, given)):
            print(f"{line.name}: {line.verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:])
