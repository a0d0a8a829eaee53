"""Train an embedding, from shards to Recall@K.

    dml train --config configs/sop_bs1000.yaml --processes 8
    accelerate launch --multi_gpu --num_processes 8 dml/train.py --config ... --set loss.beta=40

The same command again resumes a run that was interrupted; the number of processes may change.
Exit codes: 0 finished, 1 an unexpected error or too little memory, 2 a mistake in what was asked for,
3 diverged, 75 interrupted by a signal and ready to be resumed.
"""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

from dml.config import Config, add_arguments, load
from dml.distributed.signals import Interrupt, Interrupted
from dml.errors import MISTAKES, NotFiniteError, memory_sentence
from dml.plan import built_sizes, plan
from shards.output import program_name, run_program

FINISHED, CRASHED, MISTAKE, DIVERGED = 0, 1, 2, 3
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
ONE_PROCESS = (
    "note: accelerate was asked for several processes but started one, which trains alone; "
    "`dml train --processes N` starts N, and so does `accelerate launch --multi_gpu --num_processes N`"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program_name("dml/train.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(make_parser().parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Train as one process of those that were launched."""
    config, problem = None, None
    try:
        config = load(arguments.config, arguments.set)
        plan(config, int(os.environ.get("WORLD_SIZE", "1")), *built_sizes(config))
    except MISTAKES as error:
        if "RANK" not in os.environ:  # one process: answer at once, without torch
            return complain(error, MISTAKE)
        problem = error
    return train(config, problem)


def complain(error: Exception | str, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"{program_name('dml/train.py')}: {error}", file=sys.stderr, flush=True)
    return code


def train(config: Config | None, problem: Exception | None = None) -> int:
    """Train on all processes that were launched; returns the exit code.

    problem: what is wrong with the config, perhaps on this process's machine alone.
    """
    interrupt = Interrupt()
    # DDP copies some gradients of convolutions into its buckets, and says so; nobody can change it.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    with ExitStack() as cleanup:
        try:
            with interrupt.start_up():
                # after parsing: --help needs no torch
                from dml import training
                from dml.distributed.processes import (
                    became_one,
                    leave_group,
                    make_accelerator,
                )
                from dml.distributed.team import Team

                accelerator = make_accelerator(config.engine.precision if config else "fp32")
            # From here on signals are noted. Before, there is nothing to save, and they end a process
            # even while it waits for the others.
            cleanup.enter_context(interrupt)
            team = Team(accelerator, interrupt)
            if became_one():
                team.say(ONE_PROCESS)
            with team.together():
                if problem:
                    raise problem
            assert config is not None
            training.train(config, team, cleanup)
            code = FINISHED
        except MISTAKES as error:
            code = complain(error, MISTAKE)
        except NotFiniteError as error:
            code = complain(error, DIVERGED)
        except Interrupted as error:
            code = complain(f"{error}; the same command resumes", INTERRUPTED)
        except Exception as error:
            sentence = memory_sentence(error)
            if sentence is None:
                raise
            print(f"{program_name('dml/train.py')}: {sentence}", file=sys.stderr, flush=True)
            return CRASHED
        leave_group()  # only where all processes have ended alike: it may wait for them
        return code


if __name__ == "__main__":
    # Until there is a run to save, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_program(main)
