"""Check the GPUs of this machine, one to eight: right, without waits, fast, and safe to kill.

    dml gpu-check --json gpu-check.json

The versions and the topology; every loss and engine, and retrieval, against float64 on the CPU; one
process against all; ZeRO 1 to 3; where a step waits for the GPU; a rank that is killed; and the speed of
the loss, of training and of the all-gather against the bare limit. It takes minutes, and writes a line
with a verdict per check as JSON, and as a page beside it. Exit codes: 0 nothing failed, 1 something
failed, 2 there is no GPU, or the files cannot be written.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dml import __version__
from dml.gpu_check.place import Sizes
from dml.gpu_check.verdict import FAILED, SKIPPED, Line, as_json, page, summary
from shards.files import write_whole
from shards.output import program_name

SOMETHING_FAILED, MISTAKE = 1, 2
ALONE = ("losses", "Recall@K", "waits", "loss speed", "training speed", "training speed, bf16")
TOGETHER = ("processes", "training speed", "training speed, bf16", "all-gather")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program_name("dml gpu-check"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", default="gpu-check.json", metavar="OUT", help="where to write")
    out = Path(parser.parse_args(argv).json)
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        return complain(f"{out} cannot be written; name a file in a folder that can be")
    import torch  # after parsing: --help needs no torch

    gpus = torch.cuda.device_count()
    if not gpus:
        built = torch.version.cuda or "no CUDA"
        return complain(
            f"there is no GPU here (torch {torch.__version__} is built for {built}); run it on a machine "
            "with one, and see `dml doctor` if there should be one"
        )
    lines = []
    for line in examine(gpus, Sizes()):
        lines.append(line)
        print(line, flush=True)
    write(out, lines)
    print(f"{summary(lines)}; {out} and {out.with_suffix('.md')} have the figures")
    return SOMETHING_FAILED if any(line.verdict == FAILED for line in lines) else 0


def complain(text: str) -> int:
    print(f"{program_name('dml gpu-check')}: {text}", file=sys.stderr)
    return MISTAKE


def examine(processes: int, sizes: Sizes, *sets: str) -> Iterator[Line]:
    """All lines, on so many processes. sets: settings of the training that is killed."""
    from dml.gpu_check.group import run_checks
    from dml.gpu_check.kill import kill_lines
    from dml.gpu_check.machine import machine_lines

    yield from machine_lines()
    yield from run_checks(ALONE, 1, sizes)
    if processes > 1:
        yield from run_checks(TOGETHER, processes, sizes)
    else:
        yield Line("several processes", SKIPPED, "there is one GPU")
    yield from run_checks(["ZeRO"], processes, sizes)
    with TemporaryDirectory() as folder:
        yield from kill_lines(processes, sizes, Path(folder), *sets)


def write(out: Path, lines: Sequence[Line]) -> None:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    about = {"dml": __version__, "date": date}
    write_whole(out, as_json(lines, about).encode())
    write_whole(out.with_suffix(".md"), page(lines, about).encode())
