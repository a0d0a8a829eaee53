"""The end of a program whose standard output goes to a pipe, as in `... | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def exit_code(main: Callable[[], int], reader_left: int = 0) -> int:
    """Run `main` and return its exit code, or `reader_left` if the reader closes the pipe early."""
    try:
        try:
            code = main()
        except SystemExit:  # argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return reader_left
    return code


def discard_output() -> None:
    """Redirect standard output to nowhere: Python flushes it at exit, and a closed pipe would fail
    again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
