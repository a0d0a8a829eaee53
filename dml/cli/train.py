"""`dml train`: the training program, and with --processes or --deepspeed also its launcher."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from dml.cli.ranks import launch
from dml.config import CONFIGS, load
from dml.errors import MISTAKES, LaunchError
from dml.plan import add_processes, built_sizes, missing_files, plan
from dml.train import MISTAKE, complain, make_parser, run


def main(argv: Sequence[str] | None = None) -> int:
    # Until there is a run to save, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = make_parser()
    add_processes(parser, "processes to start on this machine", most=1000)
    parser.add_argument(
        "--deepspeed",
        choices=("zero1", "zero2", "zero3"),
        help="divide the optimizer state (zero1), the gradients too (zero2), the weights too (zero3)",
    )
    arguments = parser.parse_args(argv)
    processes = arguments.processes
    if processes == 1 and not arguments.deepspeed:
        return run(arguments)
    try:
        config = load(arguments.config, arguments.set)
        plan(config, processes, *built_sizes(config))
        if missing := missing_files(config):
            raise LaunchError("; ".join(missing))
        variables = deepspeed_variables(arguments.deepspeed) if arguments.deepspeed else {}
    except MISTAKES as error:
        return complain(error, MISTAKE)
    sets = ["--set", *arguments.set] if arguments.set else []
    return launch(["--config", *arguments.config, *sets], processes, variables)


def deepspeed_variables(stage: str) -> dict[str, str]:
    """What `accelerate launch --config_file configs/accelerate/STAGE.yaml` would set."""
    if missing := [name for name in ("deepspeed", "transformers") if find_spec(name) is None]:
        raise LaunchError(
            f"{missing[0]} is not installed; pip install deepspeed transformers ninja"
        )
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(CONFIGS / "accelerate" / f"{stage}.json"),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        # DeepSpeed calls ninja, which may be in the environment's folder only
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    }
