"""dml COMMAND ...: one door to all programs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from dml import __version__
from dml.rules import did_you_mean
from shards.output import STOPPED, exit_code, run_program, start_as

MISTAKE = 2


@dataclass(frozen=True)
class Command:
    """module: has `main(argv)`. workers: it has worker processes, which must not be waited for.
    reader_left: the exit code if the reader of its output leaves early."""

    module: str
    about: str
    workers: bool = False
    reader_left: int = 0


COMMANDS = {
    "demo": Command("dml.cli.demo", "train on the bundled icons: a minute or two", workers=True),
    "shards build": Command("shards.build", "pack a dataset or a folder of photos for training"),
    "shards index-tars": Command("shards.index_tars", "index webdataset tars where they are"),
    "shards sheet": Command("shards.sheet", "draw some of its classes, to check them by eye"),
    "shards verify": Command(
        "shards.verify", "check every byte of it, or decode it (--deep)", reader_left=1
    ),
    "plan": Command("dml.plan", "check a config and print every number that follows from it"),
    "train": Command("dml.cli.train", "train, or resume a training", workers=True),
    "embed": Command("dml.embed", "embed images with a trained model", workers=True),
    "search": Command("dml.search", "find the nearest neighbours of an image", workers=True),
    "index": Command("dml.inference.make_index", "make the search in a large set faster", True),
    "look": Command("dml.look.program", "write a page of a run's errors, classes and map", True),
    "export": Command("dml.export.program", "take the model away: ONNX, torch, Hugging Face", True),
    "sweep": Command("launch.slurm", "run many configs on a Slurm cluster or on this machine"),
    "report": Command("launch.report", "put the results of many runs beside the paper's"),
    "config": Command("dml.config.__main__", "print every key of a config"),
    "doctor": Command("dml.cli.doctor", "check this machine: versions, devices, disk, network"),
    "gpu-check": Command("dml.gpu_check.main", "prove and measure it on this machine's GPUs"),
}


def overview(prefix: str = "") -> str:
    chosen = {name: each for name, each in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, chosen))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in chosen.items()]
    return "\n".join(
        [
            f"usage: dml {prefix}COMMAND ...",
            "",
            *lines,
            "",
            f"dml {prefix}COMMAND --help says more. Version {__version__}.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"dml {__version__}")
        return 0
    for count in (1, 2):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return run(name, words[count:])
    prefix = "shards " if words[:1] == ["shards"] else ""
    rest = words[1:] if prefix else words
    if not rest or rest[0] in ("--help", "-h"):
        return exit_code(lambda: print(overview(prefix)) or 0)
    typed = f"{prefix}{rest[0]}"
    close = did_you_mean(typed, COMMANDS)
    print(
        f"dml: there is no command {typed}; {close}choose one of these\n{overview(prefix)}",
        file=sys.stderr,
    )
    return MISTAKE


def run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS[name]
    start_as(f"dml {name}")

    def program() -> int:
        code: int = import_module(command.module).main(words)
        return code

    if command.workers:
        run_program(program)
    try:
        return exit_code(program, command.reader_left)
    except KeyboardInterrupt:
        return STOPPED
