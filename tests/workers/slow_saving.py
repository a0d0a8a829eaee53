"""Trains; every checkpoint takes two seconds longer.

python slow_saving.py --config ...
"""

import os
import sys
import time

import dml.run_folder.checkpoint
from dml.train import main

write_step = dml.run_folder.checkpoint.write_step


def slowly(*args):
    print("saving", flush=True)
    time.sleep(2)
    write_step(*args)


if __name__ == "__main__":
    dml.run_folder.checkpoint.write_step = slowly
    os._exit(main(sys.argv[1:]))
