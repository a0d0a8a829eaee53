"""Compiles inject.c, and says what it shall do to a process."""

import errno
import shutil
import subprocess
from pathlib import Path

from chaos.judge import Skip

SOURCE = Path(__file__).with_name("inject.c")


def compile_shim(folder: Path) -> Path:
    library = folder / "inject.so"
    compiler = shutil.which("cc")
    if compiler is None:
        raise Skip("no C compiler (cc) here: errors of the disk and of the clock are not injected")
    if not library.exists():
        command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
        subprocess.run([*command, "-ldl"], check=True)
    return library


def failing_disk(
    library: Path, under: Path, log: Path, call: str, nth: int, error: str, times: int
) -> dict[str, str]:
    """times: how many calls fail; 0 for all that follow."""
    return {
        "LD_PRELOAD": str(library),
        "CHAOS_UNDER": str(under),
        "CHAOS_LOG": str(log),
        "CHAOS_FAIL": f"{call}:{nth}:{getattr(errno, error)}:{times}",
    }


def jumping_clock(library: Path, after: int, jump: int) -> dict[str, str]:
    """jump: seconds by which the wall clock is wrong, `after` seconds from the start."""
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": f"{after}:{jump}"}
