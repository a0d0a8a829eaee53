"""Print docs/config.md: every key of a config, with its type, default, rule and meaning."""

import argparse
from collections.abc import Sequence

from dml.config.reference import reference
from shards.output import exit_code, program_name


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog=program_name("python -m dml.config"), description=__doc__
    ).parse_args(argv)
    print(reference(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
