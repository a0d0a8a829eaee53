"""Trains several runs, one after another in the same processes, which saves their start.

python several.py RUNS

RUNS is a JSON file: a list of {"port", "arguments"}. After each run a line "exit code N" goes to
standard error.
"""

import json
import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

from dml.train import main


def train_all(runs):
    for run in runs:
        os.environ["MASTER_PORT"] = str(run["port"])
        code = main(run["arguments"])
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        sys.stdout.flush()
        print(f"exit code {code}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    train_all(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)
