"""`dml train`: the training program, and with --processes or --deepspeed also its launcher."""

import signal
from collections.abc import Sequence
from importlib.util import find_spec

from dml.cli.ranks import launch
from dml.config import load
from dml.errors import MISTAKES, LaunchError
from dml.plan import add_processes, built_sizes, missing_files, plan
from dml.train import MISTAKE, complain, make_parser, run
from launch.zero import STAGES, deepspeed_variables, search_path


def main(argv: Sequence[str] | None = None) -> int:
    # Until there is a run to save, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = make_parser()
    add_processes(parser, "processes to start on this machine", most=1000)
    parser.add_argument(
        "--deepspeed",
        choices=STAGES,
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
        variables = {}
        if arguments.deepspeed:
            require_deepspeed()
            variables = {"PATH": search_path(), **deepspeed_variables(arguments.deepspeed)}
    except MISTAKES as error:
        return complain(error, MISTAKE)
    sets = ["--set", *arguments.set] if arguments.set else []
    return launch(["--config", *arguments.config, *sets], processes, variables)


def require_deepspeed() -> None:
    if missing := [name for name in ("deepspeed", "transformers") if find_spec(name) is None]:
        raise LaunchError(
            f"{missing[0]} is not installed; pip install deepspeed transformers ninja"
        )
