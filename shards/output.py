"""How a program prints and ends: any name on any terminal, its exit code, its last words, and a reader
that leaves early, as in `... | head`."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

UNEXPECTED, STOPPED = 1, 130  # exit codes after an error that nobody foresaw, and after Ctrl-C


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program that has worker processes or threads, and end this process with its exit code.

    Python's own shutdown would wait for the workers, and the threads of gloo now and then abort a
    process whose work is done. So nothing is waited for; workers end with their parent.
    """
    code = UNEXPECTED
    try:
        code = exit_code(main)
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else UNEXPECTED
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def exit_code(main: Callable[[], int], reader_left: int = 0) -> int:
    """Run `main` and return its exit code, or `reader_left` if the reader closes the pipe early."""
    escape_unprintable()
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


def escape_unprintable() -> None:
    """Print what the terminal's encoding lacks as \\u1234: a file name must not end a program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Redirect standard output to nowhere: Python flushes it at exit, and a closed pipe would fail
    again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
