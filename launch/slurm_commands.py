"""Slurm's commands, called in this one place."""

import shutil
import subprocess

TIMEOUT_SECONDS = 60


class SlurmError(RuntimeError):
    """Slurm refused a command, did not answer in time, or is not installed."""


def is_installed(program: str) -> bool:
    return shutil.which(program) is not None


def slurm(*command: str) -> str:
    """Run a command such as squeue and return its output; SlurmError says why it failed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",  # the names of other users' jobs
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
