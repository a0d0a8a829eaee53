"""Train on the bundled icons, with two processes where there are two cores: the whole way in a minute or
two. The same command again resumes it, or says that it is finished.
"""

import argparse
from collections.abc import Sequence

from dml.cli import train
from dml.config import CONFIGS, add_set
from shards.cores import available_cores
from shards.output import program_name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program_name("dml demo"), description=__doc__)
    add_set(parser, "overlay single values, for example --set length.steps=50")
    arguments = parser.parse_args(argv)
    sets = ["--set", *arguments.set] if arguments.set else []
    config = ["--config", str(CONFIGS / "icons_mini.yaml"), *sets]
    return train.main([*config, "--processes", str(min(2, available_cores()))])
