"""Lines of `dml gpu-check`, as JSON: python gpu_checking.py FUNCTION SIZES ARGUMENTS

FUNCTION: run_checks or kill_lines. SIZES, ARGUMENTS: JSON; the arguments by name.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from dml.gpu_check.group import run_checks
from dml.gpu_check.kill import kill_lines
from dml.gpu_check.place import Sizes


def main(function, sizes, arguments):
    sizes, given = Sizes(**json.loads(sizes)), json.loads(arguments)
    if function == "run_checks":
        lines = run_checks(given["checks"], given["processes"], sizes)
    else:
        lines = kill_lines(given["processes"], sizes, Path(given["folder"]), *given["sets"])
    print(json.dumps([asdict(line) for line in lines]))


if __name__ == "__main__":
    main(*sys.argv[1:])
