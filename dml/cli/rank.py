"""One process of a training that dml/cli/ranks.py has started:

python dml/cli/rank.py ACCOUNT --config ...

ACCOUNT is the number of an open file. The traceback of an unexpected error goes there, and the launcher
shows that of the process which failed first: the others only lose their connection to it.
"""

import os
import signal
import sys
from collections.abc import Sequence

from dml.distributed.signals import SIGNALS
from dml.train import MISTAKE, complain
from dml.train import main as train
from shards.output import run_program, start_as


def main(argv: Sequence[str]) -> int:
    account, *words = argv
    try:
        return start(words)
    except Exception:  # run_program prints the traceback
        sys.stderr = os.fdopen(int(account), "w", errors="backslashreplace")
        raise


def start(words: Sequence[str]) -> int:
    import torch

    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < gpus < processes:
        text = f"{processes} processes need {processes} GPUs, but there are {gpus}"
        return complain(f"{text}; set --processes {gpus}", MISTAKE)
    if not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
    return train(words)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the launcher until now
    start_as("dml train")
    run_program(lambda: main(sys.argv[1:]))
